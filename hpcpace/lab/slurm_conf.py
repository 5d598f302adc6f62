"""The configuration files of a lab's Slurm (22.05 and later) as text; nothing here touches the disk."""

from __future__ import annotations

from hpcpace.lab.files import LabFiles
from hpcpace.lab.plan import CONTROLLER, CONTROLLER_ADDRESS, SLURMD_PORT, SPINE, LabPlan

CGROUP_CONF = "CgroupPlugin=cgroup/v1\n"
NODE_TIMEOUT_S = 30
KILL_WAIT_S = 15
"""Seconds from SIGTERM to SIGKILL, long enough for a report."""


def slurm_conf(plan: LabPlan, files: LabFiles, *, first_job_id: int = 1) -> str:
    """Return slurm.conf for a cluster with one partition.

    Args:
        plan: plan of the lab.
        files: files of the lab.
        first_job_id: id of the first job.
    """
    settings = {
        "ClusterName": "lab",
        "SlurmctldHost": f"{CONTROLLER}({CONTROLLER_ADDRESS})",
        "FirstJobId": first_job_id,
        "SlurmUser": "root",
        "SlurmdUser": "root",
        "AuthType": "auth/munge",
        # A requeued job is held until its credential expires, by default after 120 s.
        "AuthInfo": f"socket={files.munge_socket},cred_expire=5",
        "CredType": "cred/munge",
        "StateSaveLocation": files.state_dir,
        "SlurmdSpoolDir": files.spool_dir("%n"),
        "SlurmctldPidFile": files.daemon_pid("slurmctld"),
        "SlurmdPort": SLURMD_PORT,
        "SlurmdPidFile": files.folder / "slurmd-%n.pid",
        "ProctrackType": "proctrack/linuxproc",
        # task/affinity refuses more tasks on a node than the machine has cores.
        "TaskPlugin": "task/none",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core",
        # Use the number of CPUs in this file, whatever the machine has.
        "SlurmdParameters": "config_overrides",
        # Sets SLURM_TOPOLOGY_ADDR, which shows jobs where their nodes are in the network.
        "TopologyPlugin": "topology/tree",
        # The controller contacts every node directly, so that a dead node does not cut off others.
        "TreeWidth": 256,
        # A dead node is noticed after this time instead of the default 300 s.
        "SlurmdTimeout": NODE_TIMEOUT_S,
        # Refuse a job that can never start; otherwise it would wait forever.
        "EnforcePartLimits": "ALL",
        "ReturnToService": 2,
        "JobAcctGatherType": "jobacct_gather/none",
        "JobCompType": "jobcomp/filetxt",
        "JobCompLoc": files.finished_jobs,
        "MailProg": "/bin/true",
        # The protocol of the MPICH wheel.
        "MpiDefault": "pmi2",
        "SwitchType": "switch/none",
        "KillWait": KILL_WAIT_S,
    }
    lines = [f"{key}={value}" for key, value in settings.items()]
    lines += [
        f"NodeName={host.name} NodeAddr={host.address} CPUs={plan.config.cpus_per_host} State=UNKNOWN"
        for host in plan.hosts
    ]
    lines.append("PartitionName=lab Nodes=ALL Default=YES MaxTime=INFINITE State=UP")
    return "\n".join(lines) + "\n"


def topology_conf(plan: LabPlan) -> str:
    """Return topology.conf: which nodes are connected to which leaf."""
    lines = [
        f"SwitchName={leaf} Nodes={','.join(host.name for host in plan.hosts if host.leaf == leaf)}"
        for leaf in plan.leaves
    ]
    lines.append(f"SwitchName={SPINE} Switches={','.join(plan.leaves)}")
    return "\n".join(lines) + "\n"
