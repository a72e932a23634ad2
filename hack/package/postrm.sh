#!/bin/sh
# Copyright The cnireload Authors.
# SPDX-License-Identifier: Apache-2.0
set -e

if [ -d /run/systemd/system ]; then
	systemctl daemon-reload || true
fi
