package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/bench/rig"
)

const (
	reindexed = 10000 // manifests
	s3Bucket  = "bench"
	// memoryGoal is for the server's memory on S3 in MiB: the goal on disk, and two parts of 16 MiB an upload.
	memoryGoal = 64 + transfers*2*16
)

// s3 compares a registry whose store is in a bucket of a local S3 server with one on disk.
func (b *bench) s3(ctx context.Context) ([]row, error) {
	gateway, err := b.startGateway(ctx)
	if err != nil {
		return nil, err
	}
	defer gateway.Stop()
	rows, err := b.s3Costs(ctx, gateway)
	if err != nil {
		return nil, err
	}
	memory, err := b.s3Memory(ctx, gateway)
	if err != nil {
		return nil, fmt.Errorf("memory: %w", err)
	}
	reindex, err := b.s3Reindex(ctx, gateway)
	if err != nil {
		return nil, fmt.Errorf("reindex: %w", err)
	}
	return append(rows, memory, reindex), nil
}

// startGateway runs versitygw on a new folder with one bucket. Its credentials are those of this process from now on.
func (b *bench) startGateway(ctx context.Context) (*rig.Server, error) {
	dir := filepath.Join(b.dir, "s3")
	if err := os.MkdirAll(filepath.Join(dir, s3Bucket), 0o777); err != nil {
		return nil, err
	}
	for name, value := range map[string]string{
		"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": rand.Text(), "AWS_SESSION_TOKEN": "", "AWS_REGION": "us-east-1",
	} {
		os.Setenv(name, value)
	}
	os.Setenv("ROOT_ACCESS_KEY", os.Getenv("AWS_ACCESS_KEY_ID"))
	os.Setenv("ROOT_SECRET_KEY", os.Getenv("AWS_SECRET_ACCESS_KEY"))
	return rig.Start(ctx, "/health", b.versitygw, func(addr string) []string {
		return []string{"--port", addr, "--health", "/health", "--keep-alive", "--quiet", "posix", dir}
	})
}

// s3Store is a store in the bucket, and its state folder.
type s3Store struct{ url, state string }

func (b *bench) newS3Store(gateway *rig.Server) (s3Store, error) {
	dir, err := os.MkdirTemp(b.dir, "state-")
	return s3Store{fmt.Sprintf("s3://%s/%s?endpoint=%s", s3Bucket, filepath.Base(dir), gateway.URL), dir}, err
}

func (s s3Store) flags() []string { return []string{"--store", s.url, "--state-dir", s.state} }

func (b *bench) startOnS3(ctx context.Context, s s3Store) (*rig.Server, error) {
	return rig.Start(ctx, "/readyz", filepath.Join(b.bin, "kiln-registry"), func(addr string) []string {
		return append([]string{"serve", "--addr", addr, "--init"}, s.flags()...)
	})
}

// s3Costs pushes a blob to both registries and pulls it, in each round.
func (b *bench) s3Costs(ctx context.Context, gateway *rig.Server) ([]row, error) {
	store, err := b.newS3Store(gateway)
	if err != nil {
		return nil, err
	}
	remote, err := b.startOnS3(ctx, store)
	if err != nil {
		return nil, err
	}
	defer remote.Stop()
	local, err := b.startRegistry(ctx)
	if err != nil {
		return nil, err
	}
	defer local.Stop()
	var push, pull, both costs
	for i := range b.rounds {
		sent, fetched, err := b.s3Round(ctx, i, remote, local)
		if err != nil {
			return nil, err
		}
		push.add(sent.s3, sent.disk)
		pull.add(fetched.s3, fetched.disk)
		both.add(sent.s3+fetched.s3, sent.disk+fetched.disk)
	}
	return []row{
		push.row("push of a blob: server CPU on S3 / on disk"),
		pull.row("pull of a blob: server CPU on S3 / on disk"),
		both.row("push and pull: server CPU on S3 / on disk").atMost(1.25),
	}, nil
}

// sides are the processor seconds per GB of the two stores.
type sides struct{ s3, disk float64 }

func (b *bench) s3Round(ctx context.Context, i int, remote, local *rig.Server) (push, pull sides, err error) {
	number := uint64(i)
	d := rig.DigestOf(number, b.size)
	send := func(to *rig.Server) func() error {
		return func() error {
			return b.client.Push(ctx, to.URL, "bench/put", d, rig.Stream(number, b.size), b.size)
		}
	}
	fetch := func(from *rig.Server) func() error {
		return times(func() error {
			_, err := b.client.Do(ctx, "GET", from.URL+"/v2/bench/put/blobs/"+d.String(), nil, 0, http.StatusOK)
			return err
		})
	}
	if push.disk, push.s3, err = versus(i, remote, send(remote), local, send(local)); err != nil {
		return push, pull, fmt.Errorf("push: %w", err)
	}
	if pull.disk, pull.s3, err = versus(i, remote, fetch(remote), local, fetch(local)); err != nil {
		return push, pull, fmt.Errorf("pull: %w", err)
	}
	gb := float64(b.size) / 1e9
	return sides{push.s3 / gb, push.disk / gb}, sides{pull.s3 / gb / pulls, pull.disk / gb / pulls}, nil
}

const pulls = 4 // in a round, since one on disk costs little

func times(f func() error) func() error {
	return func() error {
		for range pulls {
			if err := f(); err != nil {
				return err
			}
		}
		return nil
	}
}

// costs are processor seconds per GB, a round each.
type costs struct{ ratio, s3, disk []float64 }

func (c *costs) add(s3, disk float64) {
	c.ratio, c.s3, c.disk = append(c.ratio, s3/disk), append(c.s3, s3), append(c.disk, disk)
}

func (c *costs) row(what string) row {
	ratio, spread := median(c.ratio)
	s3, _ := median(c.s3)
	disk, _ := median(c.disk)
	return row{what: what, value: ratio, notes: fmt.Sprintf("%s; %.2f and %.2f cpu-s per GB", spread, s3, disk)}
}

// s3Memory measures the server's memory with several uploads at once, and then downloads.
func (b *bench) s3Memory(ctx context.Context, gateway *rig.Server) (row, error) {
	store, err := b.newS3Store(gateway)
	if err != nil {
		return row{}, err
	}
	reg, err := b.startOnS3(ctx, store)
	if err != nil {
		return row{}, err
	}
	defer reg.Stop()
	most, err := rig.Peak(reg.PID(), func() error { return b.together(ctx, reg.URL, transfers, b.size) })
	return atMost("anonymous memory of kiln-registry on S3", most, memoryGoal, " MiB",
		fmt.Sprintf("%d blobs of %d MiB", transfers, b.size>>20)), err
}

// s3Reindex fills a store with manifests, drops the state folder and times the making of the index.
func (b *bench) s3Reindex(ctx context.Context, gateway *rig.Server) (row, error) {
	store, err := b.newS3Store(gateway)
	if err != nil {
		return row{}, err
	}
	if err := b.fill(ctx, store); err != nil {
		return row{}, err
	}
	if err := os.RemoveAll(store.state); err != nil {
		return row{}, err
	}
	began := time.Now()
	if _, err := b.command(ctx, "reindex", store); err != nil {
		return row{}, err
	}
	took := time.Since(began)
	rows, err := b.command(ctx, "export", store)
	if err != nil {
		return row{}, err
	}
	if n := bytes.Count(rows, []byte("\n")); n != 2*reindexed {
		return row{}, fmt.Errorf("the index has %d rows, want %d manifests and as many tags", n, reindexed)
	}
	return atMost(fmt.Sprintf("reindex of %d manifests from the bucket", reindexed), took.Seconds(), 60, " s", ""), nil
}

func (b *bench) fill(ctx context.Context, store s3Store) error {
	reg, err := b.startOnS3(ctx, store)
	if err != nil {
		return err
	}
	defer reg.Stop()
	const repo = "bench/manifests"
	for _, blob := range [][]byte{emptyConfig, tinyShard()} {
		err := b.client.Push(ctx, reg.URL, repo, identity.Sum(blob), bytes.NewReader(blob), int64(len(blob)))
		if err != nil {
			return err
		}
	}
	var group errgroup.Group
	group.SetLimit(16)
	for i := range reindexed {
		group.Go(func() error {
			return b.client.PushManifest(ctx, reg.URL, repo, fmt.Sprint("v", i), manifest(i))
		})
	}
	return group.Wait()
}

// command runs a command of kiln-registry on a store that no server has, and returns what it printed.
func (b *bench) command(ctx context.Context, name string, store s3Store) ([]byte, error) {
	cmd := exec.CommandContext(ctx, filepath.Join(b.bin, "kiln-registry"), append([]string{name}, store.flags()...)...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil {
		return nil, fmt.Errorf("kiln-registry %s: %w: %s", name, err, &errs)
	}
	return out.Bytes(), nil
}
