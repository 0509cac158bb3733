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
)

const transfers = 8 // at once, in the memory rows

// registry compares the registry's processor time for blobs with that of a bare net/http server, and measures the
// memory of both ends.
func (b *bench) registry(ctx context.Context) ([]row, error) {
	reg, err := b.startRegistry(ctx)
	if err != nil {
		return nil, err
	}
	defer reg.stop()
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	bareDir := filepath.Join(b.dir, "bare")
	if err := os.Mkdir(bareDir, 0o777); err != nil {
		return nil, err
	}
	bare, err := start(ctx, "/ready", self, func(addr string) []string { return []string{"bare", bareDir, addr} })
	if err != nil {
		return nil, err
	}
	defer bare.stop()
	put, err := b.put(ctx, reg, bare)
	if err != nil {
		return nil, err
	}
	get, err := b.get(ctx, reg, bare)
	if err != nil {
		return nil, err
	}
	memory, err := b.memory(ctx)
	return append([]row{get, put}, memory...), err
}

// put sends blobs of equal size and new content to both servers in turn.
func (b *bench) put(ctx context.Context, reg, bare *server) (row, error) {
	var ratios, ours []float64
	for i := range b.rounds {
		number := uint64(i)
		d := digestOf(number, b.size)
		toRegistry := func() error {
			return b.client.push(ctx, reg.url, "bench/put", d, newStream(number, b.size), b.size)
		}
		toBare := func() error {
			_, err := b.client.do(ctx, "PUT", bare.url+"/blob?sha256="+d.Hex(), newStream(number, b.size), b.size,
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
func (b *bench) get(ctx context.Context, reg, bare *server) (row, error) {
	const times = 8
	blob := reg.url + "/v2/bench/put/blobs/" + digestOf(uint64(b.rounds-1), b.size).String()
	fetch := func(url string) func() error {
		return func() error {
			for range times {
				if _, err := b.client.do(ctx, "GET", url, nil, 0, http.StatusOK); err != nil {
					return err
				}
			}
			return nil
		}
	}
	var ratios, ours []float64
	for i := range b.rounds {
		r, o, err := versus(i, reg, fetch(blob), bare, fetch(bare.url+"/blob"))
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
func versus(round int, reg *server, ours func() error, bare *server, theirs func() error) (r, o float64, err error) {
	for side := range 2 {
		if (side+round)%2 == 0 {
			o, err = reg.during(ours)
		} else {
			r, err = bare.during(theirs)
		}
		if err != nil {
			return 0, 0, err
		}
	}
	return r, o, nil
}

// memory measures the anonymous memory of a server and of kiln-pull with eight transfers at once, at an eighth of the
// size and at the full one: memory must not grow with the blob.
func (b *bench) memory(ctx context.Context) ([]row, error) {
	var server, pull [2]float64
	for i, size := range []int64{b.size / 8, b.size} {
		var err error
		if server[i], pull[i], err = b.peaks(ctx, size); err != nil {
			return nil, fmt.Errorf("memory: %w", err)
		}
	}
	note := fmt.Sprintf("%d blobs of %d MiB", transfers, b.size>>20)
	rows := func(who string, p [2]float64) []row {
		return []row{
			atMost("anonymous memory of "+who, p[1], 64, " MiB", note),
			atMost("the same / with blobs an eighth as large", p[1]/p[0], 1.25, "", fmt.Sprintf("%.1f MiB there", p[0])),
		}
	}
	return append(rows("kiln-registry", server), rows("kiln-pull", pull)...), nil
}

// peaks runs eight uploads and then eight downloads of size bytes against a new server, and a kiln-pull of a model of
// eight shards of that size, and returns the peak of the server and of kiln-pull in MiB.
func (b *bench) peaks(ctx context.Context, size int64) (server, pull float64, err error) {
	reg, err := b.startRegistry(ctx)
	if err != nil {
		return 0, 0, err
	}
	defer reg.stop()
	model, err := b.model(ctx, transfers, size)
	if err != nil {
		return 0, 0, err
	}
	defer os.RemoveAll(model)
	ref := strings.TrimPrefix(reg.url, "http://") + "/bench/model:v1"
	out := filepath.Join(b.dir, fmt.Sprintf("pulled-%d", size))
	defer os.RemoveAll(out)
	server, err = peak(reg.cmd.Process.Pid, func() error {
		if err := b.together(ctx, reg.url, size); err != nil {
			return err
		}
		pushed := exec.CommandContext(ctx, filepath.Join(b.bin, "kiln-push"), "base", model, ref)
		if text, err := pushed.CombinedOutput(); err != nil {
			return fmt.Errorf("kiln-push: %w: %s", err, text)
		}
		cmd := exec.CommandContext(ctx, filepath.Join(b.bin, "kiln-pull"), "pull", ref, out)
		var said strings.Builder
		cmd.Stdout, cmd.Stderr = &said, &said
		if err := cmd.Start(); err != nil {
			return err
		}
		if pull, err = peak(cmd.Process.Pid, cmd.Wait); err != nil {
			return fmt.Errorf("kiln-pull: %w: %s", err, &said)
		}
		return nil
	})
	return server, pull, err
}

// together uploads eight blobs at once, then downloads them at once.
func (b *bench) together(ctx context.Context, base string, size int64) error {
	var up, down errgroup.Group
	for i := range transfers {
		number := uint64(1000 + i)
		up.Go(func() error {
			return b.client.push(ctx, base, "bench/many", digestOf(number, size), newStream(number, size), size)
		})
	}
	if err := up.Wait(); err != nil {
		return err
	}
	for i := range transfers {
		d := digestOf(uint64(1000+i), size)
		down.Go(func() error {
			_, err := b.client.do(ctx, "GET", base+"/v2/bench/many/blobs/"+d.String(), nil, 0, http.StatusOK)
			return err
		})
	}
	return down.Wait()
}
