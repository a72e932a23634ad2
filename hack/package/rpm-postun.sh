#!/bin/sh
# Copyright The cnireload Authors.
# SPDX-License-Identifier: Apache-2.0

if [ -d /run/systemd/system ]; then
	systemctl daemon-reload >/dev/null 2>&1 || :
	# An upgrade. Pods outlive the restart; a daemon that was stopped stays so.
	[ "$1" = 0 ] || systemctl try-restart containerd.service >/dev/null 2>&1 || :
fi
