#!/bin/bash
# Process 1 of a virtual node: node.sh NAME FOLDER. It has namespaces of its own already; here it gets its own name, hosts file
# and shared memory, and a slurmd. It lives on while slurmd is down, as a real node would, and takes up orphans.
set -e
hostname "$1"
mount --bind "$2/hosts" /etc/hosts
mount -t tmpfs -o mode=1777,size=1g tmpfs /dev/shm
slurmd -N "$1" -f "$2/slurm.conf" -D < /dev/null > "$2/log/slurmd.$1.out" 2>&1 &
while :; do
    wait || true
    sleep 0.2
done
