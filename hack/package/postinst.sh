#!/bin/sh
# Copyright The cnireload Authors.
# SPDX-License-Identifier: Apache-2.0
set -e

unit=containerd.service config=/etc/containerd/config.toml

case $1 in configure | abort-upgrade | abort-deconfigure | abort-remove) ;; *) exit 0 ;; esac

# Debian's plugins are in /usr/lib/cni, everybody else's in /opt/cni/bin. Not a conffile: dpkg would ask
# about the configuration that many nodes have, and stop where nobody answers.
if [ ! -e "$config" ] && [ ! -h "$config" ]; then
	mkdir -p /etc/containerd
	cp /usr/share/containerd/config.toml "$config"
elif grep -Eq '^[[:space:]]*disabled_plugins[[:space:]]*=.*"?(io\.containerd\.grpc\.v1\.)?cri"?' "$config" 2>/dev/null; then
	echo "containerd: disabled_plugins in $config names cri: kubelet cannot use this containerd until it is removed" >&2
fi

# What debhelper would write. Older packages of others mask the unit when they are removed.
if [ -x /usr/bin/deb-systemd-helper ]; then
	deb-systemd-helper unmask "$unit" >/dev/null || true
	if deb-systemd-helper --quiet was-enabled "$unit"; then
		deb-systemd-helper enable "$unit" >/dev/null || true
	else
		# Disabled by the administrator.
		deb-systemd-helper update-state "$unit" >/dev/null || true
	fi
fi

# Images are built in chroots, where no systemd runs. deb-systemd-invoke asks policy-rc.d.
if [ -d /run/systemd/system ]; then
	systemctl --system daemon-reload >/dev/null || true
	# Pods outlive the restart (KillMode=process). A daemon that was stopped stays so.
	if [ -n "$2" ]; then action=try-restart; else action=start; fi
	deb-systemd-invoke "$action" "$unit" >/dev/null || true
fi
