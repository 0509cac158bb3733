package main

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"golang.org/x/sync/errgroup"

	"github.com/kiln-registry/kiln-registry/internal/bench/rig"
)

const (
	transfers = 8 // at once, in the memory rows

	// MiB of anonymous memory that each end may take, buffers too.
	serverLimit = 32
	clientLimit = 24
)

// blobCosts compares the registry's processor time for blobs with that of a bare net/http server.
func (b *bench) blobCosts(ctx context.Context) ([]row, error) {
	reg, err := b.startRegistry(ctx)
	if err != nil {
		return nil, err
	}
	defer reg.Stop()
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	bareDir, err := os.MkdirTemp(b.dir, "bare-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(bareDir)
	bare, err := rig.Start(ctx, "/ready", self, func(addr string) []string { return []string{"bare", bareDir, addr} })
	if err != nil {
		return nil, err
	}
	defer bare.Stop()
	put, err := b.put(ctx, reg, bare)
	if err != nil {
		return nil, err
	}
	get, err := b.get(ctx, reg, bare)
	return []row{get, put}, err
}

// startRegistry runs kiln-registry on a new store.
func (b *bench) startRegistry(ctx context.Context) (*rig.Server, error) {
	return rig.Kiln(ctx, filepath.Join(b.bin, "kiln-registry"), b.dir)
}

// put sends blobs of equal size and new content to both servers in turn.
func (b *bench) put(ctx context.Context, reg, bare *rig.Server) (row, error) {
	var ratios, ours []float64
	for i := range b.rounds {
		number := uint64(i)
		d := rig.DigestOf(number, b.size)
		toRegistry := func() error {
			return b.client.Push(ctx, reg.URL, "bench/put", d, rig.Stream(number, b.size), b.size)
		}
		toBare := func() error {
			_, err := b.client.Do(ctx, "PUT", bare.URL+"/blob?sha256="+d.Hex(), rig.Stream(number, b.size), b.size,
				http.StatusCreated)
			return err
		}
		r, o, err := versus(i, reg, toRegistry, bare, toBare)
		if err != nil {
			return row{}, fmt.Errorf("PUT: %w", err)
		}
		ratios, ours = append(ratios, o/r), append(ours, o/(float64(b.size)/1e9))
	}
	ratio, spread := median(ratios)
	cost, _ := median(ours)
	return atMost("PUT of a blob: server CPU / bare hash, write, fsync", ratio, 1.15, "",
		fmt.Sprintf("%s; %.2f cpu-s per GB", spread, cost)), nil
}

// get fetches the blob of the last put from both servers, a few times a round since one costs little.
func (b *bench) get(ctx context.Context, reg, bare *rig.Server) (row, error) {
	const times = 8
	blob := reg.URL + "/v2/bench/put/blobs/" + rig.DigestOf(uint64(b.rounds-1), b.size).String()
	fetch := func(url string) func() error {
		return func() error {
			for range times {
				if _, err := b.client.Do(ctx, "GET", url, nil, 0, http.StatusOK); err != nil {
					return err
				}
			}
			return nil
		}
	}
	var ratios, ours []float64
	for i := range b.rounds {
		r, o, err := versus(i, reg, fetch(blob), bare, fetch(bare.URL+"/blob"))
		if err != nil {
			return row{}, fmt.Errorf("GET: %w", err)
		}
		ratios, ours = append(ratios, o/r), append(ours, o/(times*float64(b.size)/1e9))
	}
	ratio, spread := median(ratios)
	cost, _ := median(ours)
	return atMost("GET of a blob: server CPU / bare sendfile", ratio, 1.10, "",
		fmt.Sprintf("%s; %.2f cpu-s per GB", spread, cost)), nil
}

// versus returns the processor seconds of both servers for their work; which one goes first alternates.
func versus(
	round int, reg *rig.Server, ours func() error, bare *rig.Server, theirs func() error,
) (r, o float64, err error) {
	for side := range 2 {
		if (side+round)%2 == 0 {
			o, err = reg.During(ours)
		} else {
			r, err = bare.During(theirs)
		}
		if err != nil {
			return 0, 0, err
		}
	}
	return r, o, nil
}

// memory measures the anonymous memory of both ends with eight transfers at once, and whether it grows with the size of
// a blob: for kiln-pull with one file, since it divides its buffers among the files that are left. It takes up to 32 times
// the size of a blob on the disk.
func (b *bench) memory(ctx context.Context) ([]row, error) {
	var server, eight, one [2]float64
	for i, size := range []int64{b.size / 8, b.size} {
		var err error
		if server[i], eight[i], err = b.peaks(ctx, transfers, size); err != nil {
			return nil, fmt.Errorf("memory: %w", err)
		}
		if _, one[i], err = b.peaks(ctx, 1, size); err != nil {
			return nil, fmt.Errorf("memory: %w", err)
		}
	}
	many := fmt.Sprintf("%d blobs of %d MiB", transfers, b.size>>20)
	growth := func(p [2]float64) string {
		return fmt.Sprintf("%.1f MiB at %d MiB, %.1f at %d", p[0], b.size>>23, p[1], b.size>>20)
	}
	return []row{
		atMost("anonymous memory of kiln-registry", server[1], serverLimit, " MiB", many),
		atMost("the same / with blobs an eighth as large", server[1]/server[0], 1.25, "", growth(server)),
		atMost("anonymous memory of kiln-pull", max(eight[0], eight[1], one[0], one[1]), clientLimit, " MiB",
			fmt.Sprintf("the most of: %s, %.1f; one, %.1f; an eighth as large, %.1f and %.1f", many, eight[1], one[1],
				eight[0], one[0])),
		atMost("one blob / one an eighth as large", one[1]/one[0], 1.25, "", growth(one)),
	}, nil
}

// peaks runs count uploads and then downloads of size bytes against a new server, and a kiln-push and kiln-pull of a
// model of as many shards of that size, and returns the peak of the server and of kiln-pull in MiB.
func (b *bench) peaks(ctx context.Context, count int, size int64) (server, pull float64, err error) {
	reg, err := b.startRegistry(ctx)
	if err != nil {
		return 0, 0, err
	}
	defer reg.Stop()
	model, err := b.model(ctx, count, size)
	if err != nil {
		return 0, 0, err
	}
	defer os.RemoveAll(model)
	ref := strings.TrimPrefix(reg.URL, "http://") + "/bench/model:v1"
	out := model + "-pulled"
	defer os.RemoveAll(out)
	server, err = rig.Peak(reg.PID(), func() error {
		if err := b.together(ctx, reg.URL, count, size); err != nil {
			return err
		}
		push := exec.CommandContext(ctx, filepath.Join(b.bin, "kiln-push"), "base", model, ref)
		if text, err := push.CombinedOutput(); err != nil {
			return fmt.Errorf("kiln-push: %w: %s", err, text)
		}
		cmd := exec.CommandContext(ctx, filepath.Join(b.bin, "kiln-pull"), "pull", ref, out)
		var said strings.Builder
		cmd.Stdout, cmd.Stderr = &said, &said
		if err := cmd.Start(); err != nil {
			return err
		}
		if pull, err = rig.Peak(cmd.Process.Pid, cmd.Wait); err != nil {
			return fmt.Errorf("kiln-pull: %w: %s", err, &said)
		}
		return nil
	})
	return server, pull, err
}

// together uploads count blobs at once, then downloads them at once.
func (b *bench) together(ctx context.Context, base string, count int, size int64) error {
	var up, down errgroup.Group
	for i := range count {
		number := uint64(1000 + i)
		up.Go(func() error {
			return b.client.Push(ctx, base, "bench/many", rig.DigestOf(number, size), rig.Stream(number, size), size)
		})
	}
	if err := up.Wait(); err != nil {
		return err
	}
	for i := range count {
		d := rig.DigestOf(uint64(1000+i), size)
		down.Go(func() error {
			_, err := b.client.Do(ctx, "GET", base+"/v2/bench/many/blobs/"+d.String(), nil, 0, http.StatusOK)
			return err
		})
	}
	return down.Wait()
}
