// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

// Package oneline makes text from plugins and files fit for conditions, log
// lines and metric labels.
package oneline

import (
	"strings"
	"unicode"
	"unicode/utf8"
)

// Max is how long a text can be, in bytes.
const Max = 1 << 10

// Of makes one line of at most Max bytes, without control characters, of s.
func Of(s string) string {
	s = strings.ToValidUTF8(s, "\uFFFD")
	s = strings.Map(func(r rune) rune {
		switch {
		case unicode.IsSpace(r):
			return ' '
		case !unicode.IsPrint(r):
			return '\uFFFD'
		}
		return r
	}, s)
	if len(s) <= Max {
		return s
	}
	const more = " ..."
	cut := Max - len(more)
	for !utf8.RuneStart(s[cut]) {
		cut--
	}
	return s[:cut] + more
}
