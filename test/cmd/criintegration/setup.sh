# shellcheck shell=bash
# Copyright The cnireload Authors.
# SPDX-License-Identifier: Apache-2.0
#
# Process 1 of new namespaces: setup.sh BASE CHECKOUT COMMAND... runs the command where every file of
# the machine is seen and none is changed, but those of the checkout.
set -euo pipefail
base=$1 checkout=$2
shift 2
# Whatever the caller has open, a shim would have open, too. Tests count a shim's pipes.
for fd in /proc/self/fd/*; do
	fd=${fd##*/}
	[ "$fd" -le 2 ] || exec {fd}>&-
done
mount -t tmpfs -o mode=755 none "$base"
mkdir "$base/upper" "$base/work" "$base/root"
# A copy of the machine's mounts below / is not wanted: what they hold is the machine's.
mount -t overlay -o "lowerdir=/,upperdir=$base/upper,workdir=$base/work" none "$base/root"
cd "$base/root"
mkdir -p ".$checkout" proc sys dev run tmp var/lib/containerd var/lib/cni etc/cni/net.d opt/cni/bin old
mount --rbind "$checkout" ".$checkout"
mount -t proc none proc
mount -t sysfs none sys
mount --rbind /sys/fs/cgroup sys/fs/cgroup
mount --rbind /dev dev
mount -t tmpfs -o mode=755 none run
mount -t tmpfs -o mode=711 none var/lib/containerd
mount -t tmpfs -o mode=1777 none dev/shm
pivot_root . old
cd /
umount -l /old
cd "$checkout"
ip link set lo up
unset TMPDIR
# Not with exec: this shell waits for what the command's children leave.
"$@"
