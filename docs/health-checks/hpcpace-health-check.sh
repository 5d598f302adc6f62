#!/usr/bin/env bash
# HealthCheckProgram= of slurm.conf: drain a node on which an audit rule finds something, and resume it when that is gone.
#
# Slurm ignores the exit code of this program and ends it after 60 s. It resumes only nodes that it has drained itself,
# which their reason shows; if hpcpace is missing, hangs or crashes, the node stays as it is.
set -u

# Slurm sets no PATH, and bash would then also look in the working folder.
export PATH=${HEALTH_PATH:-/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin}
program=${HEALTH_PROGRAM:-/sw/hpcpace/bin/hpcpace}
rules=${HEALTH_RULES:-H01,N05,P01,P02,P07,P08} # hardware and node settings only, never what users choose
limit_s=${HEALTH_LIMIT_S:-40}
node=${SLURMD_NODENAME:-$(hostname -s)}

error=$(mktemp) || exit 0
trap 'rm -f "$error"' EXIT
line=$(timeout --kill-after=5 "$limit_s" "$program" audit --prolog --fail-on "$rules" 2>"$error")
code=$?
reason=$(scontrol --oneliner show node "$node" | sed -n 's/.*Reason=\(.*\)/\1/p')

if [[ $code == [14] && $line == "hpcpace audit: "* ]]; then
    # What somebody else has drained keeps its reason.
    [[ -n $reason ]] || scontrol update "nodename=$node" state=drain "reason=${line:0:200}"
elif [[ $code == 0 && ! -s $error && $reason == "hpcpace audit: "* ]]; then
    scontrol update "nodename=$node" state=resume
elif [[ $code != 0 || -s $error ]]; then
    logger --tag hpcpace "health check: the audit was not done (exit $code): $(tail -n 1 "$error")" || true
fi
exit 0
