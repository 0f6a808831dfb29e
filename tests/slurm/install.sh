#!/bin/bash
# The packages that tests/slurm needs, 4 MB, on Debian and its kin. Where they cannot be had it says so and the tests are
# skipped with their reason: no other test needs them.
set -uo pipefail
packages=(slurmctld slurmd slurm-client munge iproute2)
lacking=
for name in slurmctld slurmd sbatch munged ip; do command -v $name > /dev/null || lacking=1; done
if [ -z "$lacking" ]; then exit 0; fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null; then
    echo "tests/slurm will be skipped: they need root and ${packages[*]}"
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
install() { timeout 300 apt-get install -y -qq --no-install-recommends "${packages[@]}" > /dev/null; }
# No service is to start: the tests bring up their own.
policy=/usr/sbin/policy-rc.d
if [ ! -e $policy ]; then
    trap 'rm -f $policy' EXIT
    printf '#!/bin/sh\nexit 101\n' > $policy
    chmod 755 $policy
fi
install || { timeout 300 apt-get update -qq && install; } || echo "tests/slurm will be skipped: no ${packages[*]} to be had"
