package main

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/kiln-registry/kiln-registry/internal/cli"
)

// TestHolderOfOther attaches to the holder of another user, where there is one to become: also root does so only when
// it names that user.
func TestHolderOfOther(t *testing.T) {
	model, m := residentModel(t)
	open, err := os.MkdirTemp("/tmp", "kiln") // the parents of t.TempDir are closed to others
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(open)
	dir, folder := filepath.Join(open, "model"), filepath.Join(open, "s")
	if err := os.CopyFS(dir, os.DirFS(model)); err != nil {
		t.Fatal(err)
	}
	code, attr := cli.CodeOK, new(syscall.SysProcAttr)
	other := os.Geteuid()
	if other == 0 {
		code, other = cli.CodeDenied, 65534
		attr.Credential = &syscall.Credential{Uid: uint32(other), Gid: uint32(other)}
	}
	if err := os.Mkdir(folder, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{open, dir} {
		if err := os.Chmod(path, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chown(folder, other, -1); err != nil {
		t.Fatal(err)
	}
	base := m.Aggregate.String()
	socket := filepath.Join(folder, m.Aggregate.Hex()+".sock")
	h := holdAs(t, nil, attr, dir, socket, "--device", "host")
	for _, command := range []string{"attach", "audit", "release"} {
		for _, env := range []string{"", "RUNTIME_DIRECTORY=" + folder} {
			args := []string{command, base}
			if env == "" {
				args = append(args, "--socket", socket)
			}
			if code == cli.CodeOK {
				break // there is no other user
			}
			p := begin(t, []string{env}, args...)
			if got := p.code(); got != code || !strings.Contains(p.stderr.String(), "65534") {
				t.Errorf("%q: exit code %d, want %d\n%s", args, got, code, p.stderr)
			}
		}
	}
	for _, args := range [][]string{{"attach", base, "--check"}, {"audit", base}, {"release", base}} {
		p := begin(t, []string{"RUNTIME_DIRECTORY=" + folder}, append(args, "--holder-uid", strconv.Itoa(other))...)
		if got := p.code(); got != cli.CodeOK {
			t.Errorf("%q: exit code %d\n%s", args, got, p.stderr)
		}
	}
	if got := h.code(); got != cli.CodeOK {
		t.Errorf("the holder: exit code %d\n%s", got, h.stderr)
	}
}
