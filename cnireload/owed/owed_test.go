// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package owed

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"testing"
	"testing/synctest"
	"time"
)

func removalOf(id string, released bool) Removal {
	return Removal{ID: id, Networks: []Network{{Interface: "eth0", List: []byte(`{"name":"pods"}`)}}, Since: time.Now(), Cause: "why", Released: released}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func load(t *testing.T, s *Store) *Store {
	t.Helper()
	t.Cleanup(s.Close)
	s.Load(t.Context(), time.Minute)
	return s
}

// A file of an earlier version, which had libcni's cache entry in it.
func TestFileOfAnEarlierVersion(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	must(t, os.WriteFile(filepath.Join(dir, "pod%2F1.json"), []byte(`{
  "handler": "kata",
  "id": "pod/1",
  "netns": "/ns",
  "args": {"K8S_POD_NAME": "web"},
  "capabilityArgs": {"portMappings": [{"hostPort": 80}]},
  "networks": [{"interface": "eth0", "list": {"name": "pods", "plugins": []}, "cache": {"kind": "cniCacheV1"}, "cacheFile": "pods-pod-1-eth0"}],
  "since": "2026-11-02T10:00:00Z",
  "cause": "agent away",
  "released": true
}`), 0o600))
	s := load(t, Open(dir, "kata"))
	since := time.Date(2026, 11, 2, 10, 0, 0, 0, time.UTC)
	want := &Removal{Handler: "kata", ID: "pod/1", NetNS: "/ns", Args: map[string]string{"K8S_POD_NAME": "web"},
		CapabilityArgs: map[string]any{"portMappings": []any{map[string]any{"hostPort": 80.}}},
		Networks:       []Network{{Interface: "eth0", List: []byte(`{"name": "pods", "plugins": []}`)}},
		Since:          since, Cause: "agent away", Released: true}
	if got := s.Get("pod/1"); !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
	if got, want := s.List(), []Summary{{ID: "pod/1", Networks: []string{"pods"}, Since: since, Cause: "agent away"}}; !reflect.DeepEqual(got, want) {
		t.Errorf("listed %+v, want %+v", got, want)
	}
	s.Done("pod/1")
	if left, _ := os.ReadDir(dir); len(left) > 0 || s.Get("pod/1") != nil {
		t.Errorf("left: %v", left)
	}
}

func TestAddSurvivesARestart(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "new")
	s := load(t, Open(dir, ""))
	must(t, s.Add(removalOf("pod-1", false)))
	s.Close()
	s.Close()
	s = load(t, Open(dir, ""))
	if r := s.Get("pod-1"); r == nil || r.Cause != "why" || r.Released {
		t.Errorf("got %+v", r)
	}
	must(t, s.BeginADD(removalOf("pod-2", false)))
	if r := s.BegunADD("pod-2"); r == nil || s.BegunADD("pod-3") != nil || s.Get("pod-2") != nil {
		t.Errorf("begun: %+v", r)
	}
	if begun := s.BegunADDs(t.Context(), time.Now()); len(begun) != 1 || begun[0].ID != "pod-2" {
		t.Errorf("begun: %+v", begun)
	}
	if begun := s.BegunADDs(t.Context(), time.Now().Add(-time.Hour)); len(begun) > 0 {
		t.Errorf("begun an hour ago: %+v", begun)
	}
	s.EndADD("pod-2")
	if r := s.BegunADD("pod-2"); r != nil {
		t.Errorf("ended: %+v", r)
	}
}

func TestStoreWithoutADirectory(t *testing.T) {
	t.Parallel()
	s := load(t, Open("", ""))
	if err := s.Add(removalOf("pod-1", true)); err == nil || len(s.List()) > 0 {
		t.Errorf("got %v, %v", err, s.List())
	}
	must(t, s.BeginADD(removalOf("pod-1", false)))
	if r := s.BegunADD("pod-1"); r != nil || len(s.BegunADDs(t.Context(), time.Now())) > 0 {
		t.Errorf("begun: %+v", r)
	}
	s.EndADD("pod-1")
	s.Done("pod-1")
}

// What cannot be written does not count.
func TestAddThatFails(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "file")
	must(t, os.WriteFile(dir, nil, 0o600))
	s := load(t, Open(dir, ""))
	for i := range Max + 1 {
		if err := s.Add(removalOf(fmt.Sprint(i), true)); err == nil || errors.Is(err, ErrTooMany) {
			t.Fatalf("%d: got %v", i, err)
		}
	}
	if owed := s.List(); len(owed) > 0 {
		t.Errorf("owed: %v", owed)
	}
}

// tries records the tries of a Work that fails as long as fail says so.
type tries struct {
	at   []time.Duration
	fail error
}

func (tr *tries) work(s *Store, missing func(*Removal) error) Work {
	start := time.Now()
	return Work{
		Busy:    func(string) bool { return false },
		Missing: missing,
		Remove: func(_ context.Context, r *Removal) error {
			tr.at = append(tr.at, time.Since(start))
			if tr.fail == nil {
				s.Done(r.ID)
			}
			return tr.fail
		},
		Expired: func(*Removal) {},
		Pause:   time.Second,
	}
}

// retry calls Retry every second.
func retry(t *testing.T, s *Store, w Work, d time.Duration) {
	for begin := time.Now(); time.Since(begin) < d; time.Sleep(time.Second) {
		s.Retry(t.Context(), w)
		synctest.Wait()
	}
}

// The pauses grow to ten minutes, until the removal is a day old.
func TestPauses(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		s := Open(dir, "")
		defer s.Close()
		must(t, s.Add(removalOf("pod-1", true)))
		tr := &tries{fail: errors.New("no")}
		retry(t, s, tr.work(s, func(*Removal) error { return nil }), time.Hour)
		var got []string
		for i, at := range tr.at {
			before := time.Duration(0)
			if i > 0 {
				before = tr.at[i-1]
			}
			got = append(got, (at - before).String())
		}
		if want := []string{"10s", "10s", "20s", "40s", "1m20s", "2m40s", "5m20s", "10m0s", "10m0s", "10m0s", "10m0s"}; !reflect.DeepEqual(got, want) {
			t.Errorf("pauses %v\nwant %v", got, want)
		}
		if owed := s.List(); len(owed) != 1 || owed[0].Attempts != len(tr.at) || owed[0].Cause != "no" {
			t.Errorf("owed: %+v", owed)
		}
		time.Sleep(MaxAge)
		if s.Retry(t.Context(), tr.work(s, func(*Removal) error { return nil })); len(s.List()) > 0 {
			t.Errorf("owed after a day: %+v", s.List())
		}
		s.Wait()
	})
}

// A removal is tried as soon as what it needs is there.
func TestMissing(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		s := Open(dir, "")
		defer s.Close()
		must(t, s.Add(removalOf("pod-1", true)))
		missing := errors.New("agent away")
		tr := &tries{}
		w := tr.work(s, func(*Removal) error { return missing })
		retry(t, s, w, time.Hour)
		if owed := s.List(); len(tr.at) > 0 || len(owed) != 1 || owed[0].Cause != "agent away" || owed[0].Attempts != 0 {
			t.Errorf("tried at %v, owed %+v", tr.at, owed)
		}
		missing = nil
		retry(t, s, w, time.Second)
		if owed := s.List(); len(tr.at) != 1 || len(owed) > 0 {
			t.Errorf("tried at %v, owed %+v", tr.at, owed)
		}
	})
}
