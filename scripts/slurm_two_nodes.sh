#!/usr/bin/env bash
# A Slurm cluster of two nodes on this host, on loopback: what tests/cli/test_slurm.py needs.
#   scripts/slurm_two_nodes.sh install      Debian's packages slurm-wlm and munge
#   scripts/slurm_two_nodes.sh start DIR    munged, slurmctld and two slurmd, with state and logs in DIR;
#                                           then: export SLURM_CONF=DIR/slurm.conf
#   scripts/slurm_two_nodes.sh stop DIR     ends what start began
# Needs root. Both nodes share the host's cores, memory and disk.
set -euo pipefail
usage() { echo "usage: $0 install | start DIR | stop DIR" >&2; exit 2; }

case ${1:-} in
install)
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq slurm-wlm munge >/dev/null
  exit ;;
start | stop) [ $# = 2 ] || usage ;;
*) usage ;;
esac
mkdir -p "$2" && dir=$(cd "$2" && pwd)
export SLURM_CONF=$dir/slurm.conf

if [ "$1" = stop ]; then
  for pid in $(pgrep -x 'slurmd|slurmctld|slurmstepd' || true); do # by their configuration: a pid file can be gone
    if tr '\0' '\n' 2>/dev/null <"/proc/$pid/environ" | grep -qx "SLURM_CONF=$SLURM_CONF"; then kill "$pid" || true; fi
  done
  exit
fi

if ! pgrep -x munged >/dev/null; then
  mkdir -p /run/munge && chown munge: /run/munge
  su munge -s /bin/sh -c "$(command -v munged)"
fi
host=$(hostname) port=$((20000 + RANDOM % 10000))
mkdir -p "$dir/state" "$dir/log"
{
  printf '%s\n' "ClusterName=rlctl" "SlurmctldHost=$host(127.0.0.1)" "SlurmctldPort=$port" "AuthType=auth/munge" \
    "SlurmUser=root" "SlurmdUser=root" "StateSaveLocation=$dir/state" "SlurmdSpoolDir=$dir/spool-%n" \
    "SlurmctldPidFile=$dir/slurmctld.pid" "SlurmdPidFile=$dir/slurmd-%n.pid" \
    "SlurmctldLogFile=$dir/log/slurmctld.log" "SlurmdLogFile=$dir/log/slurmd-%n.log" \
    "ProctrackType=proctrack/linuxproc" "TaskPlugin=task/none" "JobAcctGatherType=jobacct_gather/none" \
    "SelectType=select/cons_tres" "SelectTypeParameters=CR_Core" "ReturnToService=2"
  for n in 0 1; do
    echo "NodeName=n$n NodeHostname=$host NodeAddr=127.0.0.1 Port=$((port + 1 + n)) CPUs=2 RealMemory=8000"
  done
  echo "PartitionName=all Nodes=n0,n1 Default=YES MaxTime=INFINITE State=UP"
} >"$SLURM_CONF"
slurmctld
slurmd -N n0 && slurmd -N n1
for _ in $(seq 60); do
  if [ "$(sinfo --noheader --Format=NodeList,StateCompact,Nodes 2>/dev/null | grep -c 'idle *2')" = 1 ]; then exit; fi
  sleep 0.5
done
echo "error: the two nodes did not become idle; see $dir/log" >&2
exit 1
