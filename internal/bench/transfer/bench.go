// Package transfer measures identify, verify, push and pull beside named programs that do the same, or less: hashing in
// memory, bare net/http, openssl, sha256sum, curl, oras, huggingface_hub and nginx.
package transfer

import (
	"context"
	"crypto/sha256"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/bench/report"
	"github.com/kiln-registry/kiln-registry/internal/bench/rig"
)

// Bench is how much is measured, and with what.
type Bench struct {
	Bin    string // folder of the three binaries
	Tools  string // folder of what is installed for tests and measurements
	Dir    string // scratch
	Size   int64  // bytes of a large shard
	Rounds int
	Full   bool // the sizes that the goals name
	Client *rig.Client

	// Model makes a folder of so many shards of so many bytes, or finds it made.
	Model func(ctx context.Context, shards int, size int64) (string, error)
}

// shards are as many as the goals name at least.
const shards = 4

func (b *Bench) path(binary string) string { return filepath.Join(b.Bin, binary) }

// payload is the bytes of all shards.
func (b *Bench) payload() float64 { return float64(shards * b.Size) }

// gb is the payload in gigabytes.
func (b *Bench) gb() float64 { return b.payload() / 1e9 }

// self runs one of the bare programs in a process of its own.
func self(ctx context.Context, args ...string) (rig.Cost, error) {
	path, err := os.Executable()
	if err != nil {
		return rig.Cost{}, err
	}
	return rig.Run(ctx, path, args...)
}

// startSelf runs a bare server on a folder.
func startSelf(ctx context.Context, name, dir string) (*rig.Server, error) {
	path, err := os.Executable()
	if err != nil {
		return nil, err
	}
	return rig.Start(ctx, "/ready", path, func(addr string) []string { return []string{name, dir, addr} })
}

// found fails, with a hint, unless every program is on PATH.
func found(programs ...string) error {
	for _, p := range programs {
		if _, err := exec.LookPath(p); err != nil {
			return fmt.Errorf("%w\nhint: apt-get install curl openssl coreutils findutils", err)
		}
	}
	return nil
}

// hashing is what crypto/sha256 takes for the payload, over a buffer that stays in cache.
func (b *Bench) hashing() (rig.Cost, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	buf, h := make([]byte, rig.Piece), sha256.New()
	total := int64(shards) * b.Size
	before, err := threadSeconds()
	if err != nil {
		return rig.Cost{}, err
	}
	for range total / rig.Piece {
		h.Write(buf)
	}
	after, err := threadSeconds()
	return rig.Cost{CPU: after - before}, err
}

func threadSeconds() (float64, error) {
	var u unix.Rusage
	err := unix.Getrusage(unix.RUSAGE_THREAD, &u)
	return float64(u.Utime.Nano()+u.Stime.Nano()) / 1e9, err
}

// serving is what work costs a server, and how long it takes.
func serving(s *rig.Server, work func() error) (c rig.Cost, err error) {
	began := time.Now()
	c.CPU, err = s.During(work)
	c.Wall = time.Since(began).Seconds()
	return c, err
}

// held is a model folder and where a registry has it.
type held struct {
	dir    string
	shards []identity.Shard
	repo   string
}

const tag = "v1"

// ref names the model at a server.
func (h held) ref(url string) string {
	return strings.TrimPrefix(url, "http://") + "/" + h.repo + ":" + tag
}

// blobs are the addresses of its shards at a server.
func (h held) blobs(url string) (all []string) {
	for _, s := range h.shards {
		all = append(all, url+api.PathBlob(h.repo, s.Digest))
	}
	return all
}

// hold pushes a model folder.
func (b *Bench) hold(ctx context.Context, dir, repo string, reg *rig.Server) (held, error) {
	h := held{dir: dir, repo: repo}
	out, err := rig.Run(ctx, b.path("kiln-push"), "identify", "--manifest", dir)
	if err != nil {
		return h, err
	}
	m, err := identity.Parse([]byte(strings.TrimSpace(out.Said)))
	if err != nil {
		return h, err
	}
	h.shards = m.Shards
	_, err = rig.Run(ctx, b.path("kiln-push"), "base", dir, h.ref(reg.URL))
	return h, err
}

// row is a median with its spread, and what else there is to say.
func row(what string, s rig.Spread, notes ...string) report.Row {
	return report.Row{What: what, Value: s.Median, Notes: strings.Join(append([]string{s.String()}, notes...), "; ")}
}

// perGB says what sides take for a gigabyte each.
func (b *Bench) perGB(of func(side string) rig.Spread, unit string, sides ...string) string {
	texts := make([]string, len(sides))
	for i, side := range sides {
		texts[i] = fmt.Sprintf("%s %.3g", side, of(side).Median/b.gb())
	}
	return strings.Join(texts, ", ") + " " + unit + " per GB"
}
