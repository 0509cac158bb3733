//go:build linux && (amd64 || arm64) && !nogpu

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kiln-registry/kiln-registry/gpuload/cuda"
	"github.com/kiln-registry/kiln-registry/gpuload/cuda/fakecuda"
)

// TestMain is the program itself when a part is started.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "-role" {
		signal.Ignore(os.Interrupt)
		os.Exit(run(context.Background(), os.Args[1:], os.Stdout, os.Stderr))
	}
	if err := os.Setenv("GORACE", "atexit_sleep_ms=0"); err != nil { // of the parts, which are processes
		panic(err)
	}
	os.Exit(m.Run())
}

// check runs everything on the stand-in for the driver, in small sizes, and returns the exit status and the table.
func check(t *testing.T, change ...string) (code int, stdout string) {
	t.Helper()
	dir := t.TempDir()
	lib, err := fakecuda.Build(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv(cuda.EnvLibrary, lib)
	for _, c := range change {
		name, value, _ := strings.Cut(c, "=")
		t.Setenv("FAKECUDA_"+name, value)
	}
	const mib = 1 << 20
	short, err := os.MkdirTemp("", "g") // a socket is made below it
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(short)
	t.Setenv("TMPDIR", short)
	c := defaults()
	c.Dir, c.Shm = t.TempDir(), t.TempDir()
	c.Model, c.Small, c.Shards, c.Copy, c.Buffer = 4*mib, 2*mib, 4, 4*mib, 4*mib
	c.Client = "../../gpuload/attach/kiln_attach.py"
	c.Chunks, c.Allocs, c.Bound = []int64{mib, 2 * mib}, []int64{2 * mib, 4 * mib}, time.Hour
	text, err := json.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	var out, stderr bytes.Buffer
	code = run(t.Context(), []string{"-config", string(text)}, &out, &stderr)
	for _, dir := range []string{c.Dir, c.Shm, short} {
		if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
			t.Errorf("%s: %d files left (%v)", dir, len(left), err)
		}
	}
	for running(t, short) {
		runtime.Gosched() // the kernel ends what a part that was killed had started
	}
	t.Log(stderr.String() + out.String())
	return code, out.String()
}

// running says whether there is a process whose arguments name the folder.
func running(t *testing.T, folder string) bool {
	t.Helper()
	paths, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	return slices.ContainsFunc(paths, func(path string) bool {
		b, err := os.ReadFile(path)
		return err == nil && bytes.Contains(b, []byte(folder))
	})
}

// cells returns the figure and the last cell of each row, by its name.
func cells(t *testing.T, table string) map[string][2]string {
	t.Helper()
	rows := map[string][2]string{}
	for line := range strings.Lines(table) {
		c := strings.Split(line, "|")
		if len(c) != 5 {
			t.Fatalf("no row of a table: %q", line)
		}
		rows[strings.TrimSpace(c[1])] = [2]string{strings.TrimSpace(c[2]), strings.TrimSpace(c[3])}
	}
	return rows
}

// TestCheck: all rows are there and hold, but for goals that are about a device.
func TestCheck(t *testing.T) {
	code, table := check(t)
	rows := cells(t, table)
	if code != 0 || !strings.Contains(table, "all of it") {
		t.Errorf("exit status %d", code)
	}
	for name, row := range rows {
		if strings.Contains(row[1], "must be") || strings.HasPrefix(row[1], "left out") && !strings.Contains(name, "torch") {
			t.Errorf("%s: %s", name, row)
		}
	}
	for _, name := range []string{
		"driver", "gpuload/cuda opens the device", "alignment of allocations", "memory after freeing",
		"pinned memory to device, 2 MiB a copy", "digests of what is read back", "audit",
		"cuda-ipc: digests in another process", "cuda-ipc: no copy of the weights",
		"cuda-ipc: Python", "vmm-fd: digests in another process", "vmm-fd: Python",
		"vmm-fd, sent by hand: digests in another process",
		"vmm-fd, its maker killed: digests in another process",
		"vmm-fd, opened again after that: digests in another process", "more memory than there is",
		"memory after it ran out", "error: cuMemAlloc without a context",
	} {
		if rows[name][1] != "ok" {
			t.Errorf("%s: %q", name, rows[name])
		}
	}
	if rows["cuda-ipc: more device memory"][0] != "0 bytes" || rows["vmm-fd: mapped only for reading"][0] != "true" ||
		rows["cuda-ipc: mapped only for reading"][0] != "false" {
		t.Errorf("%q", rows)
	}
}

// TestFaults breaks the driver: the row that is about it fails, the others are there all the same.
func TestFaults(t *testing.T) {
	for _, tt := range []struct {
		change    string
		code      int
		row, cell string
	}{
		{"FLIP_COPY=1", 1, "cuda-ipc: digests in another process", "failed (must be: as on the disk)"},
		{"FAIL_IPC=1", 1, "attach", "failed (publish the weights"},
		{"FAIL_COPY=1", 1, "copies", "failed (copy: an illegal memory access"},
		{"FAIL_PIN=1", 1, "copies", "failed (cuMemHostRegister: out of memory"},
		{"FAIL_READ=1", 1, "cuda-ipc: another process attaches", "failed (must be: an answer)"},
		{"NO_FD=1", 0, "vmm-fd", "left out (open cuda:0: vmm-fd: the device has CU_DEVICE_ATTRIBUTE_HANDLE_TYPE"},
		{"NO_READ_ONLY=1", 0, "vmm-fd: mapped only for reading", "ok"},
		{"MEMORY=1048576", 1, "allocation", "failed (cuMemAlloc of 2097152: out of memory"},
	} {
		t.Run(tt.change, func(t *testing.T) {
			code, table := check(t, tt.change)
			rows := cells(t, table)
			if got := rows[tt.row][1]; code != tt.code || !strings.HasPrefix(got, tt.cell) {
				t.Errorf("exit status %d, %s: %q", code, tt.row, got)
			}
			if all := map[int]string{0: "ok", 1: "failed"}[tt.code]; rows["driver"][1] != "ok" || rows["all of it"][1] != all {
				t.Errorf("%q", rows)
			}
		})
	}
}

func TestNoDevice(t *testing.T) {
	code, table := check(t, "DEVICES=0")
	rows := cells(t, table)
	if code != 1 || !strings.Contains(rows["bind"][1], "failed (cuInit: no CUDA-capable device") {
		t.Errorf("exit status %d, %q", code, rows["bind"])
	}
	if rows["errors"][1] != "left out (there is no device)" {
		t.Errorf("%q", rows["errors"])
	}
}

// TestHang: copies never end, so that every part that copies is ended, and the table is complete.
func TestHang(t *testing.T) {
	before := slices.Clone(parts)
	t.Cleanup(func() { parts = before })
	parts = slices.Clone(parts)
	for i := range parts {
		if slices.Contains([]string{"copies", "overlap", "load", "attach", "descriptors"}, parts[i].name) {
			parts[i].bound = 200 * time.Millisecond
		}
	}
	code, table := check(t, "HANG=1")
	rows := cells(t, table)
	for _, name := range []string{"copies", "overlap", "load", "attach", "descriptors"} {
		if want := "failed (no end after 200ms)"; rows[name][1] != want {
			t.Errorf("%s: %q, want %q", name, rows[name], want)
		}
	}
	if code != 1 || rows["driver"][1] != "ok" || rows["memory after it ran out"][1] != "ok" {
		t.Errorf("exit status %d, %q", code, rows)
	}
}

func TestFlags(t *testing.T) {
	for _, args := range [][]string{{"-x"}, {"extra"}, {"-config", "{"}} {
		var stdout, stderr bytes.Buffer
		if code := run(t.Context(), args, &stdout, &stderr); code != 2 || stdout.Len() > 0 || stderr.Len() == 0 {
			t.Errorf("%q: exit status %d, %q", args, code, stderr.String())
		}
	}
	var stdout, stderr bytes.Buffer
	if code := run(t.Context(), []string{"-role", "x"}, &stdout, &stderr); code != 1 {
		t.Errorf("exit status %d for a part that is not there", code)
	}
}

// TestSizes makes the models no larger than memory and disk allow.
func TestSizes(t *testing.T) {
	c := config{Dir: t.TempDir(), Shm: filepath.Join(t.TempDir(), "none"), Model: 1 << 20, Small: 1 << 20, Shards: 3}
	remove, err := makeModels(t.Context(), &c)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range c.SmallShards {
		info, err := os.Stat(filepath.Join(c.Shm, s.Name))
		if err != nil || s.Data != 1<<20/3/32*32 || info.Size() <= s.Data {
			t.Errorf("%+v, %v", s, err)
		}
	}
	if err := remove(); err != nil {
		t.Fatal(err)
	}
	if n := meminfo(strings.NewReader("MemTotal: 5 kB\nMemAvailable:    3 kB\n")); n != 3<<10 {
		t.Errorf("%d bytes available", n)
	}
	if n := meminfo(strings.NewReader("")); n != 1<<30 {
		t.Error(fmt.Sprint(n, " bytes where nothing is said"))
	}
}
