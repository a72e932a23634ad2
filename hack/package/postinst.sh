#!/bin/sh
# Copyright The cnireload Authors.
# SPDX-License-Identifier: Apache-2.0
set -e

# Images are built in chroots, where no systemd runs.
if [ "$1" = configure ] && [ -d /run/systemd/system ]; then
	systemctl daemon-reload || true
	# Pods outlive the restart (KillMode=process). A daemon that was stopped stays so.
	systemctl try-restart containerd.service || true
fi
