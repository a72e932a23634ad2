// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package groupcommit

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	bolt "go.etcd.io/bbolt"
)

// The test binary is also the program that is killed, and the one that tells
// what a database holds; test/durability uses it, too.
const (
	childEnv  = "CNIRELOAD_GROUPCOMMIT" // "write FILE" or "show FILE"
	batchSize = 4
)

func child() bool {
	what, file, ok := strings.Cut(os.Getenv(childEnv), " ")
	if !ok {
		return false
	}
	var err error
	switch what {
	case "write":
		err = writeOrders(file, os.Stdin, os.Stdout)
	case "show":
		err = show(file, os.Stdout)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	return true
}

// writeOrders reads one order a line and says what happens, one line each:
//
//	batch NAME [STEP]  as many writes as batchSize, which wait together. They are
//	                   NAME-0 and so on. At that step, two for each function, it
//	                   says "at STEP" and stops for ever.
//	leave NAME         a write whose caller leaves after 50 ms
//
// "ack ID" is said when a write has succeeded, "no ID ERROR" when it has not.
func writeOrders(file string, in io.Reader, out io.Writer) error {
	db, err := bolt.Open(file, 0o600, &bolt.Options{NoFreelistSync: true})
	if err != nil {
		return err
	}
	q := New(db)
	var mu sync.Mutex
	say := func(format string, args ...any) {
		mu.Lock()
		defer mu.Unlock()
		fmt.Fprintf(out, format+"\n", args...)
	}
	answer := func(id string, err error) {
		if err != nil {
			say("no %s %v", id, err)
		} else {
			say("ack %s", id)
		}
	}
	say("ready")
	for orders := bufio.NewScanner(in); orders.Scan(); {
		f := strings.Fields(orders.Text())
		switch f[0] {
		case "leave":
			go func() {
				ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
				defer cancel()
				answer(f[1], q.Update(ctx, func(tx *bolt.Tx) error { return twoPuts(tx, f[1], func() {}) }))
			}()
		case "batch":
			stop := -1
			if len(f) > 2 {
				if stop, err = strconv.Atoi(f[2]); err != nil {
					return err
				}
			}
			q.Lock()
			for i := range batchSize {
				step := 2 * i
				at := func() {
					if step == stop {
						say("at %d", step)
						select {}
					}
					step++
				}
				id := fmt.Sprintf("%s-%d", f[1], i)
				go func() {
					answer(id, q.Update(context.Background(), func(tx *bolt.Tx) error { return twoPuts(tx, id, at) }))
				}()
				for waiting := 0; waiting <= i; {
					time.Sleep(100 * time.Microsecond)
					q.mu.Lock()
					waiting = len(q.waiting)
					q.mu.Unlock()
				}
			}
			q.Unlock()
		}
	}
	return nil
}

var halves = [2]string{"left", "right"}

// twoPuts is a write that is whole if both of its puts are there.
func twoPuts(tx *bolt.Tx, id string, at func()) error {
	for _, half := range halves {
		b, err := tx.CreateBucketIfNotExists([]byte(half))
		if err != nil {
			return err
		}
		if err := b.Put([]byte(id), make([]byte, 300)); err != nil {
			return err
		}
		at()
	}
	return nil
}

// show prints the names of the writes in a database that are whole, and fails
// if one is not or the database is damaged.
func show(file string, out io.Writer) error {
	db, err := bolt.Open(file, 0o600, &bolt.Options{Timeout: 10 * time.Second})
	if err != nil {
		return err
	}
	defer db.Close()
	return db.View(func(tx *bolt.Tx) error {
		for err := range tx.Check() {
			return fmt.Errorf("%s is damaged: %w", file, err)
		}
		var found [2]map[string]bool
		for i, half := range halves {
			found[i] = map[string]bool{}
			if b := tx.Bucket([]byte(half)); b != nil {
				if err := b.ForEach(func(k, _ []byte) error { found[i][string(k)] = true; return nil }); err != nil {
					return err
				}
			}
		}
		if !maps.Equal(found[0], found[1]) {
			return fmt.Errorf("%s: a write is there by half: %v and %v", file, found[0], found[1])
		}
		for _, id := range slices.Sorted(maps.Keys(found[0])) {
			fmt.Fprintln(out, id)
		}
		return nil
	})
}

// A process that is killed at any moment has written all that it acknowledged,
// and of all else the whole or nothing. Test/durability does the same at each
// sync, and with what a loss of power leaves.
func TestKilled(t *testing.T) {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "test.db")
	acked := map[string]bool{}
	trials := 2*batchSize + 8
	if testing.Short() {
		trials = 2*batchSize + 2
	}
	for trial := range trials {
		cmd := exec.Command(exe)
		cmd.Env = append(os.Environ(), childEnv+"=write "+file)
		cmd.Stderr = os.Stderr
		in, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		// A batch that is complete, and then others, of which one stops between
		// two functions or all go on until the end comes by chance.
		fmt.Fprintf(in, "batch %d.0\n", trial)
		steps := trial < 2*batchSize
		asked := 1
		lines := bufio.NewScanner(out)
		for n := 0; lines.Scan(); {
			verb, rest, _ := strings.Cut(lines.Text(), " ")
			switch verb {
			case "ack":
				acked[rest] = true
				n++
			case "no":
				t.Errorf("trial %d: %s", trial, lines.Text())
			case "at":
				if err := cmd.Process.Kill(); err != nil {
					t.Error(err)
				}
			}
			switch {
			case n != batchSize*asked:
			case steps:
				fmt.Fprintf(in, "batch %d.%d %d\n", trial, asked, trial)
				asked++
			default:
				if asked == 1 {
					time.AfterFunc(time.Duration(rand.IntN(60_000))*time.Microsecond, func() { _ = cmd.Process.Kill() })
				}
				fmt.Fprintf(in, "batch %d.%d\n", trial, asked)
				asked++
			}
		}
		_ = cmd.Wait() // killed
		there := shown(t, exe, file)
		for id := range acked {
			if !there[id] {
				t.Errorf("trial %d: %s was acknowledged and is not there", trial, id)
			}
		}
		if steps {
			for i := range batchSize {
				if id := fmt.Sprintf("%d.1-%d", trial, i); there[id] {
					t.Errorf("trial %d: %s is there and was never committed", trial, id)
				}
			}
		}
	}
	t.Logf("%d trials, %d writes acknowledged", trials, len(acked))
}

func shown(t *testing.T, exe, file string) map[string]bool {
	t.Helper()
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), childEnv+"=show "+file)
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	there := map[string]bool{}
	for _, id := range strings.Fields(string(out)) {
		there[id] = true
	}
	return there
}
