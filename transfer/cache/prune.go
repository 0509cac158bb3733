package cache

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/transfer/staging"
)

// PruneOptions says what to remove.
type PruneOptions struct {
	Older time.Duration // files not used, and partial files not changed, for that long; zero: none
	Max   int64         // the longest unused files, until the others take no more bytes than that; zero: no bound
	Pulls []string      // folders in which pulls were made: what those that were interrupted left there is removed too
}

// Pruned is what was removed and what stays.
type Pruned struct {
	Removed       int   `json:"removed_files"`
	RemovedBytes  int64 `json:"removed_bytes"`
	Partials      int   `json:"removed_partials"`
	PartialBytes  int64 `json:"removed_partial_bytes"`
	Kept          int   `json:"kept_files"`
	KeptBytes     int64 `json:"kept_bytes"`
	Linked        int   `json:"linked_files"` // of those kept: removing them would free nothing, as folders have them
	LinkedBytes   int64 `json:"linked_bytes"`
	Busy          int   `json:"busy_partials"` // on their way in
	untilFreeable int64
}

// file is one of a cache.
type file struct {
	path   string
	digest identity.Digest
	size   int64
	used   time.Time
	links  uint64
}

// Prune removes files that no pulled folder has as its own, those that were not used for longest first, and what pulls
// that are gone left behind. A file on its way in stays, and so does one that is in use: a folder keeps its bytes.
func (c *Cache) Prune(ctx context.Context, o PruneOptions) (p Pruned, err error) {
	now := time.Now()
	files, err := c.list()
	if err != nil {
		return p, err
	}
	slices.SortFunc(files, func(a, b file) int { return cmp.Or(a.used.Compare(b.used), cmp.Compare(a.path, b.path)) })
	for _, f := range files {
		if f.links == 1 {
			p.untilFreeable += f.size
		}
	}
	for _, f := range files {
		if err := context.Cause(ctx); err != nil {
			return p, err
		}
		old := o.Older > 0 && now.Sub(f.used) > o.Older
		if f.links == 1 && (old || o.Max > 0 && p.untilFreeable > o.Max) {
			if err := c.remove(f.path); err != nil {
				return p, err
			}
			p.Removed, p.RemovedBytes, p.untilFreeable = p.Removed+1, p.RemovedBytes+f.size, p.untilFreeable-f.size
			continue
		}
		p.Kept, p.KeptBytes = p.Kept+1, p.KeptBytes+f.size
		if f.links > 1 {
			p.Linked, p.LinkedBytes = p.Linked+1, p.LinkedBytes+f.size
		}
	}
	if o.Older > 0 {
		err = c.sweep(ctx, append([]string{filepath.Join(c.dir, partialName)}, o.Pulls...), now.Add(-o.Older), &p)
	}
	return p, err
}

// sweep removes what interrupted pulls left in folders before a time.
func (c *Cache) sweep(ctx context.Context, dirs []string, before time.Time, p *Pruned) error {
	for _, dir := range dirs {
		real, err := staging.Target(dir)
		if err != nil {
			return err
		}
		entries, err := os.ReadDir(real)
		if err != nil {
			return err
		}
		for _, e := range entries {
			name, is := strings.CutSuffix(strings.TrimPrefix(e.Name(), "."), ".kiln")
			if !is || !e.IsDir() || !strings.HasPrefix(e.Name(), ".") {
				continue
			}
			target := filepath.Join(real, name)
			freed, err := staging.Sweep(target, before, func() (*staging.Area, error) {
				return staging.Open(ctx, target, c.o.Staging)
			})
			switch {
			case errors.Is(err, staging.ErrBusy):
				p.Busy++
			case errors.Is(err, fs.ErrNotExist), errors.Is(err, staging.ErrForeign):
			case err != nil:
				return err
			case freed > 0:
				p.Partials, p.PartialBytes = p.Partials+1, p.PartialBytes+freed
			}
		}
	}
	return nil
}

// list returns the files of the cache, but not those in folders that are foreign. What is left of a write that was cut
// short is removed.
func (c *Cache) list() (files []file, err error) {
	root := filepath.Join(c.dir, filesName)
	err = filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
		if err == nil && e.IsDir() && path != root && c.usable(filepath.Join(path, "file")) != nil {
			return fs.SkipDir
		}
		if err != nil || e.IsDir() {
			return err
		}
		fi, err := e.Info()
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		d, suffix, ok := parse(e.Name())
		if !ok {
			return c.leftover(path, fi)
		}
		if suffix != "" {
			return nil
		}
		f := file{path, d, fi.Size(), fi.ModTime(), 0}
		f.links = uint64(fi.Sys().(*syscall.Stat_t).Nlink)
		if r, err := os.Lstat(path + recordSuffix); err == nil {
			f.used = r.ModTime()
		}
		files = append(files, f)
		return nil
	})
	return files, err
}

// leftover removes the temporary file of a record if nobody can be writing it any more.
func (c *Cache) leftover(path string, fi fs.FileInfo) error {
	if !strings.HasPrefix(filepath.Base(path), ".") || time.Since(fi.ModTime()) < time.Hour {
		return nil
	}
	return c.disk().Remove(path)
}
