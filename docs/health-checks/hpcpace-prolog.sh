#!/usr/bin/env bash
# Prolog= of slurm.conf: keep jobs off a node on which an audit rule finds something that needs a repair.
#
# When a prolog fails, Slurm drains the node and puts the job back into the queue. So this one fails only where the audit
# has printed a finding of one of these rules. If hpcpace is missing, hangs, crashes or is called with a wrong option, the
# job starts, and the reason is one line in the system's log.
set -u

# Slurm sets no PATH, and bash would then also look in the working folder.
export PATH=${HEALTH_PATH:-/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin}
program=${HEALTH_PROGRAM:-/sw/hpcpace/bin/hpcpace}
rules=${HEALTH_RULES:-H01,N05,P01,P02,P07,P08} # hardware and node settings only, never what users choose
limit_s=${HEALTH_LIMIT_S:-20} # of PrologEpilogTimeout; jobs wait for the prolog

error=$(mktemp) || exit 0
trap 'rm -f "$error"' EXIT
line=$(timeout --kill-after=5 "$limit_s" "$program" audit --prolog --fail-on "$rules" 2>"$error")
code=$?

# 4: a failure, 1: a warning. Python also ends with 1 when it crashes, but then there is no such line.
if [[ $code == [14] && $line == "hpcpace audit: "* ]]; then
    # Slurm itself would only say "Prolog error".
    scontrol update "nodename=${SLURMD_NODENAME:-$(hostname -s)}" state=drain "reason=${line:0:200}"
    exit 1
fi
if [[ $code != 0 || -s $error ]]; then
    logger --tag hpcpace "prolog: the audit was not done (exit $code): $(tail -n 1 "$error")" || true
fi
exit 0
