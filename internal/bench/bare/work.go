package bare

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sync/errgroup"

	"github.com/kiln-registry/kiln-registry/internal/bench/rig"
)

// get fetches all its arguments at once and drops what it receives.
func get(ctx context.Context, urls []string, _ io.Writer) error {
	c := rig.NewClient()
	all, ctx := errgroup.WithContext(ctx)
	for _, url := range urls {
		all.Go(func() error {
			req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
			if err != nil {
				return err
			}
			res, err := c.Client.Do(req)
			if err != nil {
				return err
			}
			defer res.Body.Close()
			if res.StatusCode != http.StatusOK {
				return fmt.Errorf("GET %s: %s", url, res.Status)
			}
			return pieces(res.Body, func([]byte) error { return nil })
		})
	}
	return all.Wait()
}

// write makes files of equal size, all at once, out of memory. Arguments: folder, number of files, bytes of each, and
// whether they are made durable: yes or no.
func write(_ context.Context, args []string, _ io.Writer) error {
	if len(args) != 4 {
		return errors.New("write: want a folder, a number, a size, and yes or no")
	}
	count, err1 := strconv.Atoi(args[1])
	size, err2 := strconv.ParseInt(args[2], 10, 64)
	if err := errors.Join(err1, err2); err != nil {
		return err
	}
	var all errgroup.Group
	for i := range count {
		all.Go(func() error {
			return keep(filepath.Join(args[0], fmt.Sprint("written-", i)), rig.Stream(uint64(i), size), args[3] == "yes")
		})
	}
	return all.Wait()
}

// sum is the plain way to hash files: one goroutine each, read in pieces, the standard library's SHA-256.
func sum(_ context.Context, paths []string, out io.Writer) error {
	sums := make([][]byte, len(paths))
	var all errgroup.Group
	for i, path := range paths {
		all.Go(func() error {
			f, err := os.Open(path)
			if err != nil {
				return err
			}
			defer f.Close()
			h := sha256.New()
			if err := pieces(f, func(p []byte) error { h.Write(p); return nil }); err != nil {
				return err
			}
			sums[i] = h.Sum(nil)
			return nil
		})
	}
	if err := all.Wait(); err != nil {
		return err
	}
	for i, s := range sums {
		fmt.Fprintf(out, "%x  %s\n", s, paths[i])
	}
	return nil
}
