package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kiln-registry/kiln-registry/cmd/kiln-registry/internal/home"
)

// TestKilledIndexCommands kills an import and a compact at instants from their begin to their end: the index is the old
// one or the new one, whole, and the same command puts it right.
func TestKilledIndexCommands(t *testing.T) {
	dir := t.TempDir()
	s := serve(t, dir)
	for i := range 60 {
		s.push(fmt.Sprintf("team/model-%d", i%7), fmt.Sprint("v", i), fmt.Sprint("bytes ", i))
	}
	s.stop()
	code, want, stderr := runs(t, dir, "index", "export")
	if code != 0 {
		t.Fatal(stderr)
	}
	if err := os.WriteFile(filepath.Join(dir, "saved"), []byte(want), 0o600); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, home.DefaultStore, home.IndexFile)
	for _, args := range [][]string{{"index", "compact"}, {"index", "import", "saved", "--replace"}} {
		t.Run(args[1], func(t *testing.T) {
			begin := time.Now()
			if code, _, stderr := runs(t, dir, args...); code != 0 {
				t.Fatal(stderr)
			}
			took, killed := time.Since(begin), 0
			for i := range 24 {
				if kill(t, dir, took*time.Duration(i)/20, args...) {
					killed++
				}
				if code, got, stderr := runs(t, dir, "index", "export"); code != 0 || got != want {
					t.Fatalf("after kill %d: exit %d, %d bytes of %d: %s", i, code, len(got), len(want), stderr)
				}
			}
			if killed < 3 {
				t.Errorf("only %d were killed before they ended", killed)
			}
			if code, _, stderr := runs(t, dir, args...); code != 0 {
				t.Error(stderr)
			}
			if left, err := filepath.Glob(path + ".*"); err != nil || len(left) > 0 {
				t.Errorf("left behind: %v, %v", left, err)
			}
		})
	}
}

// kill runs the program, kills it after a time, and says whether it was killed before it ended.
func kill(t *testing.T, dir string, after time.Duration, args ...string) bool {
	t.Helper()
	cmd := program(context.Background(), dir, args...)
	var out strings.Builder
	cmd.Stderr = &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	late := time.AfterFunc(after, func() { cmd.Process.Kill() })
	defer late.Stop()
	err := cmd.Wait()
	if err != nil && cmd.ProcessState.ExitCode() != -1 {
		t.Fatalf("%v: %v: %s", args, err, out.String())
	}
	return err != nil
}
