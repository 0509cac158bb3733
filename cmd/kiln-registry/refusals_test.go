package main

import (
	"bytes"
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/cmd/kiln-registry/internal/home"
	"github.com/kiln-registry/kiln-registry/internal/cli"
)

func TestCommandsThatDoNotExist(t *testing.T) {
	dir := t.TempDir()
	refused(t, 2, []string{`"creat"`, "create"}, dir, "token", "creat", "x")
	refused(t, 2, []string{`"frob"`, "create"}, dir, "token", "frob")
	refused(t, 2, []string{"create"}, dir, "token")
	if code, out, stderr := runs(t, dir, "token", "--help"); code != 0 || !strings.Contains(out, "create") {
		t.Error(code, stderr)
	}
	for _, args := range [][]string{{"version"}, {"--version"}} {
		if code, out, stderr := runs(t, dir, args...); code != 0 || !strings.Contains(out, cli.Version()) {
			t.Error(args, code, out, stderr)
		}
	}
	if _, out, _ := runs(t, dir, "serve", "--help"); strings.Contains(out, "\t") {
		t.Error("a tab in the help of serve")
	}
}

func TestTokensThatAreNotMade(t *testing.T) {
	dir := t.TempDir()
	create := func(name, file string, more ...string) []string {
		return append([]string{"token", "create", name, "--token-file", file, "--repo", "**"}, more...)
	}
	for _, d := range []string{"-5h", "-1ns", "1ns", "999ms", "2000000h"} {
		refused(t, 2, []string{"--expires"}, dir, create("ex", "t.yaml", "--expires", d)...)
	}
	refused(t, 4, []string{"no folder missing/deep"}, dir, create("x", "missing/deep/t.yaml")...)
	refused(t, 2, []string{"--token-file"}, dir, create("x", "")...)
	for _, name := range []string{"", "a b", " a", "a\nb", "a\x1bb", "a\u202eb", "\xff"} {
		if code, out, stderr := runs(t, dir, create(name, "t.yaml")...); code != 2 || out != "" ||
			strings.Count(stderr, "\n") != 1 || !strings.Contains(stderr, "name") {
			t.Errorf("%q: %d %s%s", name, code, out, stderr)
		}
	}
	if found, _ := os.ReadDir(dir); len(found) != 0 {
		t.Error("a refused command left something behind:", found)
	}
	if code, _, stderr := runs(t, dir, create("x", "t.yaml", "--expires", "0")...); code != 0 {
		t.Error(stderr)
	}
}

func TestAddressesThatAreNoUse(t *testing.T) {
	dir := t.TempDir()
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	for addr, word := range map[string]string{
		"frob": "missing port", "": "missing port", "127.0.0.1:999999": "0 to 65535", "127.0.0.1:": "no port",
		"127.0.0.1:http": "no port", "::1:5": "too many colons", "127.0.0.1:-1": "no port", "127.0.0.1:05": "no port",
	} {
		refused(t, 2, []string{word, "--addr", "HOST:PORT"}, dir, "serve", "--addr", addr)
	}
	if found, _ := os.ReadDir(dir); len(found) != 0 {
		t.Error("a refused command left something behind:", found)
	}
	refused(t, 2, []string{"already in use", "another port"}, dir, "serve", "--addr", taken.Addr().String())
	refused(t, 2, []string{"this machine"}, dir, "serve", "--addr", "192.0.2.1:0", "--insecure-open")
}

func TestServeFlags(t *testing.T) {
	dir := t.TempDir()
	for _, args := range [][]string{{"--idle-timeout", "0"}, {"--idle-timeout", "-1s"}, {"--drain-timeout", "-1s"},
		{"--drain-delay", "-1s"}, {"--store", ""}} {
		code, out, stderr := runs(t, dir, append([]string{"serve", "--addr", "127.0.0.1:0"}, args...)...)
		if code != 2 || out != "" || !strings.Contains(stderr, args[0]) {
			t.Errorf("%v: %d %s%s", args, code, out, stderr)
		}
	}
	refused(t, 2, []string{"--store"}, dir, "export", "--store", "")
	refused(t, 2, []string{"--store"}, dir, "reindex", "--store", "")
	if err := os.WriteFile(filepath.Join(dir, "x.pem"), []byte("not PEM"), 0o600); err != nil {
		t.Fatal(err)
	}
	refused(t, 4, []string{"--tls-cert", "missing.pem"}, dir, "serve", "--tls-cert", "missing.pem", "--tls-key", "x.pem")
	refused(t, 4, []string{"--tls-key", "missing.pem"}, dir, "serve", "--tls-cert", "x.pem", "--tls-key", "missing.pem")
	refused(t, 5, []string{"x.pem", "PEM"}, dir, "serve", "--tls-cert", "x.pem", "--tls-key", "x.pem")
	if found, _ := os.ReadDir(dir); len(found) != 1 {
		t.Error("a refused command left something behind:", found)
	}
}

// A user who may not open the socket is told so, and not that no registry runs.
func TestSocketOfAnotherUser(t *testing.T) {
	dir := t.TempDir()
	s := serve(t, dir)
	store := filepath.Join(dir, home.DefaultStore)
	cmd := program(t.Context(), "", "export", "--store", store)
	if os.Geteuid() == 0 {
		if err := os.Chmod(store, 0o755); err != nil { // so that it is the socket that is closed
			t.Fatal(err)
		}
		at, err := os.Open(dir)
		if err != nil {
			t.Fatal(err)
		}
		defer at.Close()
		// The folders above the store and the test binary may be closed to others: neither is gone through.
		cmd.ExtraFiles, cmd.Args[len(cmd.Args)-1] = []*os.File{at}, filepath.Join("/proc/self/fd/3", home.DefaultStore)
		cmd.Path = "/proc/self/exe"
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	} else if err := os.Chmod(filepath.Join(store, home.SocketFile), 0); err != nil {
		t.Fatal(err)
	}
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	var exit *exec.ExitError
	if err := cmd.Run(); !errors.As(err, &exit) {
		t.Fatal(err)
	}
	if text := stderr.String(); exit.ExitCode() != 7 || !strings.Contains(text, "permission denied") ||
		!strings.Contains(text, "hint: the store belongs to another user") {
		t.Errorf("%d: %s", exit.ExitCode(), text)
	}
	s.stop()
}

// A store that lacks what the index has seen is no matter of an address.
func TestReplayFails(t *testing.T) {
	dir := t.TempDir()
	s := serve(t, dir)
	s.push("a", "v1", "1")
	log := filepath.Join(dir, home.DefaultStore, "refs.log")
	before, err := os.ReadFile(log)
	if err != nil {
		t.Fatal(err)
	}
	s.push("a", "v2", "2")
	s.stop()
	if err := os.WriteFile(log, before, 0o644); err != nil { // an old backup
		t.Fatal(err)
	}
	code, _, stderr := runs(t, dir, "serve", "--addr", "127.0.0.1:0")
	if code != 7 || !strings.Contains(stderr, "hint: the store lacks records") || !strings.Contains(stderr, "reindex") {
		t.Fatal(code, stderr)
	}
	refused(t, 7, []string{"refs.log", "reindex --store"}, dir, "export")
	if code, _, stderr := runs(t, dir, "reindex"); code != 0 {
		t.Fatal(stderr)
	}
	s = serve(t, dir)
	s.do(200, "GET", api.PathManifest("a", "v1"), nil)
	s.do(404, "GET", api.PathManifest("a", "v2"), nil)
	s.stop()
}

// A folder that is there already keeps its mode; one that is made is closed to others.
func TestStoreIsPrivate(t *testing.T) {
	dir := t.TempDir()
	own := filepath.Join(dir, "own")
	if err := errors.Join(os.Mkdir(own, 0o755), os.Chmod(own, 0o755)); err != nil {
		t.Fatal(err)
	}
	for name, mode := range map[string]os.FileMode{"own": 0o755, "deep/made": 0o700} {
		serve(t, dir, "--store", name, "--init").stop()
		if st, err := os.Stat(filepath.Join(dir, name)); err != nil || st.Mode().Perm() != mode {
			t.Errorf("%s: %v, %v", name, st, err)
		}
	}
}

// A secret that was put into the URL of a store is not said again: not by --print-config, and by no refusal.
func TestSecretsInTheURLOfAStore(t *testing.T) {
	dir := t.TempDir()
	for _, at := range []string{
		"s3://AK:HUSH@bucket/p", "s3://AK:SEC/HUSH@bucket/p", "s3://AK:HUSH/bucket", "s3:/AK:HUSH@bucket/p",
		"S3:/AK:HUSH@bucket/p", "s3:AK:HUSH@bucket/p", "https:/AK:HUSH@host/p", "https://AK:HUSH@host/p",
		"s3://bucket/p?secret-key=HUSH", "s3://bucket/p?HUSH", "s3://bucket/p?%ZZHUSH", "s3://bucket/p#HUSH",
		"s3://bucket/p?endpoint=https://AK:HUSH@host", "s3://bucket/p?endpoint=AK:HUSH",
		"s3://bucket/p?addressing=path&addressing=HUSH",
	} {
		for _, args := range [][]string{
			{"serve", "--store", at}, {"serve", "--print-config", "--store", at}, {"reindex", "--store", at},
			{"copy", at, "elsewhere"}, {"copy", "elsewhere", at},
		} {
			code, stdout, stderr := runs(t, dir, args...)
			if code != 2 || stdout != "" || strings.Contains(stderr, "HUSH") {
				t.Errorf("%v: exit %d: %s%s", args, code, stdout, stderr)
			}
		}
	}
	if found, _ := os.ReadDir(dir); len(found) != 0 {
		t.Error("a refused command left something behind:", found)
	}
}
