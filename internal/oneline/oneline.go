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

// Join joins errors as errors.Join does, but on one line.
func Join(errs []error) error {
	switch len(errs) {
	case 0:
		return nil
	case 1:
		return errs[0]
	}
	return joined(errs)
}

type joined []error

func (e joined) Error() string {
	texts := make([]string, len(e))
	for i, err := range e {
		texts[i] = err.Error()
	}
	return strings.Join(texts, "; ")
}

func (e joined) Unwrap() []error { return e }
