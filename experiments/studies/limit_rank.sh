#!/bin/sh
# Task prolog of Slurm: moves the task that is about to start, which is this shell's parent, into the control group that
# limits its processor time. What it prints would be read by Slurm, so that it only fails where the group is missing.
echo "$PPID" >"/sys/fs/cgroup/cpu/hpcpace-lab-$HPCPACE_LAB_NAME/$SLURMD_NODENAME-rank$SLURM_LOCALID/cgroup.procs"
