package transfer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/transfer/cache"
	"github.com/kiln-registry/kiln-registry/transfer/fetch"
	"github.com/kiln-registry/kiln-registry/transfer/folder"
	"github.com/kiln-registry/kiln-registry/transfer/staging"
)

const (
	defaultJobs = 8
	maxNamed    = 5 // files that an error names
)

// What a pull says of files that were not received.
type (
	MismatchError = fetch.MismatchError // bytes that are not those of the digest
	FetchError    = fetch.Error         // which files were not received; the others are kept for the next try
	FailedFile    = fetch.FailedFile
)

// Mirror is a place besides the registry that has blobs, as client.NewMirror opens it. An empty Repo is that of the
// registry.
type Mirror = fetch.Source

var (
	// ErrOccupied: the target holds something that was not pulled there, or something else than is asked for now.
	ErrOccupied = errors.New("the target is occupied")
	// ErrExtra: what is at the target has files that the artifact lacks.
	ErrExtra = errors.New("files that are not part of the artifact")
	// ErrTarget: a folder can't be put there in one step.
	ErrTarget = errors.New("no place for a folder")
)

// SpaceError: the disk does not have room for what is missing.
type SpaceError struct {
	Path       string
	Need, Free int64 // bytes
}

// Error states both numbers.
func (e *SpaceError) Error() string {
	return fmt.Sprintf("%s: needs %d bytes, %d bytes free", e.Path, e.Need, e.Free)
}

// UnavailableError: a registry knows that it can't give files of a base, as it found them damaged or missing. It is an
// api.ErrBlobUnknown.
type UnavailableError struct {
	Host      string
	Aggregate identity.Aggregate
	Files     []staging.File // which of those that are needed
}

// Error names the files.
func (e *UnavailableError) Error() string {
	var names []string
	for _, f := range e.Files {
		names = append(names, fmt.Sprintf("%s (%s)", f.Name, f.Digest))
	}
	return fmt.Sprintf("base %s can't be pulled from %s, where these of its shards are damaged or missing: %s",
		e.Aggregate, e.Host, some(names))
}

// Unwrap returns api.ErrBlobUnknown.
func (e *UnavailableError) Unwrap() error { return api.ErrBlobUnknown }

// PullOptions says how to pull. The zero value is ready to use.
type PullOptions struct {
	Jobs    int          // files, or parts of a file, received at a time, at most; zero: 8
	Rate    int64        // bytes received a second, at most; zero: no bound
	Mirrors []Mirror     // where bytes may come from too; they are asked for nothing else, and believed nothing
	Replace bool         // replace whatever folder is at the target; its files are hashed, and used if they match
	Repair  bool         // as Replace, of a folder that has no files besides: also without a record, and whatever it says
	Cache   *cache.Cache // where files are looked for first, and what is received is kept; nil: nowhere
	Watch   Watch
	Staging staging.Options // its Notify is set from Watch if it is nil

	// Bring, if set, is told once which files are missing, and may bring any of them into the area: see
	// staging.Area.Bring. Those that the area then has are not fetched. An error ends the pull.
	Bring func(ctx context.Context, missing []staging.File, to *staging.Area) error
}

// Pulled is what a pull did.
type Pulled struct {
	Record   staging.Record
	Target   string // canonical path of the folder
	Already  bool   // it was there: nothing was received or changed
	Received int64  // bytes
	Resumed  int64  // bytes that an earlier, interrupted pull had received
	Adopted  int64  // bytes of files that were there already and damaged
	Reused   int    // files that were there already and matched

	Cached      int   // files that were in the cache, or were received for it by another pull meanwhile
	CachedBytes int64 // of those
	Copied      int64 // bytes that were copied out of the cache and hashed, as they could not be linked
}

// Pull makes dir the folder of an artifact: whole and verified, or not at all. What an interrupted pull received is kept
// beside dir and used by the next one; every byte is hashed once, as it is written. A folder that is there already is
// left, if it is that of the artifact and was not touched since it was verified, unless Replace or Repair ask to hash it
// again. Damage to a folder that was pulled is
// repaired, in a folder beside it: of a file whose midstates the registry has, what matches is copied. Any other folder
// that is not empty is ErrOccupied. The files of a checkpoint get no second name, and one that has one is fetched anew.
//
// With a Cache, a file that it has is not received, and what is received is kept there. Files are then links to those of
// the cache, of mode 0444, where the filesystem can; those of a checkpoint share at most blocks. The folder counts as
// verified when the oldest of its files was.
//
// A plan of some files makes a folder that is marked as such, and is no base. Another plan of some files of the same
// artifact adds to it, and the plan of all completes it.
//
// The errors are staging.ErrBusy, staging.ErrCollides, staging.ErrForeign, staging.ErrLost, ErrOccupied, ErrTarget, *SpaceError,
// *UnavailableError and *FetchError. After each of them dir is as it was.
func Pull(ctx context.Context, c *client.Client, plan Plan, dir string, o PullOptions) (Pulled, error) {
	if o.Jobs <= 0 {
		o.Jobs = defaultJobs
	}
	if o.Staging.Notify == nil {
		o.Staging.Notify = func(s string) { o.Watch.tell(Event{Step: Noted, Note: s}) }
	}
	target, err := place(dir)
	if err != nil {
		return Pulled{}, err
	}
	p := &pull{plan: plan, o: o, c: c, done: Pulled{Record: plan.Record, Target: target}}
	if err := p.look(); err != nil || p.done.Already {
		return p.done, err
	}
	if p.area, err = staging.Open(ctx, target, o.Staging); err != nil {
		return p.done, err
	}
	if err = p.look(); err == nil && !p.done.Already { // another pull may have ended just now
		err = p.run(ctx)
	}
	return p.done, errors.Join(err, p.area.Close())
}

// OnlyError: a pattern names no file of an artifact, or is none.
type OnlyError struct {
	Pattern string
	Names   []string // of all files
	Err     error    // what is wrong with the pattern; nil: it names nothing
}

// Error names the files.
func (e *OnlyError) Error() string {
	if e.Err != nil {
		return fmt.Sprintf("pattern %.200q: %v", e.Pattern, e.Err)
	}
	return fmt.Sprintf("no file is called %.200q; there are %s", e.Pattern, some(e.Names))
}

// Only returns the plan of the files whose names match one of several patterns, as path.Match reads them; one without a
// slash is about the last element of a name. What is left of a base is none. *OnlyError.
func (p Plan) Only(patterns []string) (Plan, error) {
	want := map[string]bool{}
	for _, pattern := range patterns {
		e := &OnlyError{Pattern: pattern}
		matched := false
		for _, f := range p.Files {
			name := f.Name
			if !strings.Contains(pattern, "/") {
				name = path.Base(name)
			}
			ok, err := path.Match(pattern, name)
			if err != nil {
				e.Err = err
				return Plan{}, e
			}
			if ok {
				want[f.Name], matched = true, true
			}
			e.Names = append(e.Names, f.Name)
		}
		if !matched {
			return Plan{}, e
		}
	}
	return p.part(want), nil
}

// part returns the plan of some of the files.
func (p Plan) part(want map[string]bool) Plan {
	if len(want) == len(p.Files) {
		return p
	}
	whole := p
	p.whole, p.PartOf = &whole, len(p.Files)
	p.Files = slices.DeleteFunc(slices.Clone(p.Files), func(f staging.File) bool { return !want[f.Name] })
	p.Aggregate, p.Base, p.NoBase = identity.Aggregate{}, identity.Manifest{}, errors.New(folder.Part(p.Record))
	return p
}

// with adds to a plan of some files those of the same artifact that the folder has already.
func (p Plan) with(r *staging.Record) Plan {
	switch {
	case p.whole == nil || r == nil || r.Manifest != p.Manifest:
		return p
	case r.PartOf == 0:
		return *p.whole
	}
	want := map[string]bool{}
	for _, f := range slices.Concat(p.Files, r.Files) {
		want[f.Name] = true
	}
	return p.whole.part(want)
}

// completes says whether a record is that of a pull of some of the files.
func (p Plan) completes(r *staging.Record) bool {
	return r != nil && r.PartOf > 0 && r.Manifest == p.Manifest
}

// pull is one Pull under way.
type pull struct {
	plan     Plan
	o        PullOptions
	c        *client.Client
	area     *staging.Area
	occupied bool                       // there are files at the target
	may      bool                       // they may be replaced
	extra    []string                   // those that are not part of the artifact
	use      []staging.File             // those that may be the ones wanted
	damaged  map[identity.Digest]string // paths of those that turned out not to be
	mu       sync.Mutex                 // guards Cached, CachedBytes and Copied of done
	done     Pulled
}

// place checks that a folder can be put at dir by a rename.
func place(dir string) (string, error) {
	target, err := staging.Target(dir)
	if err != nil {
		return "", err
	}
	parent := filepath.Dir(target)
	if parent == target {
		return "", fmt.Errorf("%w: %s is the root of the filesystem", ErrTarget, target)
	}
	fi, err := os.Lstat(target)
	if errors.Is(err, fs.ErrNotExist) {
		return target, nil
	}
	if err != nil {
		return "", err
	}
	if !fi.IsDir() {
		return "", fmt.Errorf("%w: %s is a file", ErrTarget, target)
	}
	up, err := os.Lstat(parent)
	if err == nil && staging.StatOf(up).Dev != staging.StatOf(fi).Dev {
		err = fmt.Errorf("%w: %s is a mount point and can't be renamed; name a folder inside it", ErrTarget, target)
	}
	return target, err
}

// look finds out what is at the target and what may become of it.
func (p *pull) look() error {
	p.occupied, p.may, p.extra, p.use = false, false, nil, nil
	there, err := list(p.done.Target)
	if err != nil || len(there) == 0 {
		return err
	}
	if err := staging.Trust(p.done.Target); err != nil {
		return err
	}
	known, err := staging.Known(p.done.Target)
	if err != nil {
		return err
	}
	p.plan = p.plan.with(known.Complete)
	same := known.Complete != nil && known.Complete.Same(p.plan.Record)
	ours := same || p.plan.completes(known.Complete)
	p.occupied = true
	p.find(there)
	hash := p.o.Replace || p.o.Repair
	if same && len(p.extra) == 0 && !hash && untouched(known.Complete, there) {
		p.done.Already, p.done.Record = true, *known.Complete
		return nil
	}
	p.may = p.o.Replace || len(p.extra) == 0 && (ours || p.o.Repair)
	switch {
	case p.may:
	case known.Complete != nil && !ours:
		err := fmt.Errorf("%w: %s holds %s@%s", ErrOccupied, p.done.Target, known.Complete.Repository, known.Complete.Manifest)
		if len(p.extra) > 0 {
			err = fmt.Errorf("%w, and %w: %s", err, ErrExtra, some(p.extra))
		}
		return err
	case len(p.extra) > 0:
		return fmt.Errorf("%w: %s holds %w: %s", ErrOccupied, p.done.Target, ErrExtra, some(p.extra))
	case known.Started == nil || !known.Started.Same(p.plan.Record):
		return p.noRecord()
	}
	return nil
}

// noRecord: a folder may be replaced only if it is known where it came from.
func (p *pull) noRecord() error {
	return fmt.Errorf("%w: %s has no record of a pull that ended", ErrOccupied, p.done.Target)
}

// find sorts what is at the target into what may be used and what is foreign.
func (p *pull) find(there map[string]fs.FileInfo) {
	names := map[string]bool{}
	for _, f := range p.plan.Files {
		names[f.Name] = true
		if fi := there[f.Name]; fi != nil && fi.Mode().IsRegular() && fi.Size() == f.Size && p.alone(fi) {
			p.use = append(p.use, f)
		}
	}
	for name := range there {
		if !names[name] {
			p.extra = append(p.extra, name)
		}
	}
	slices.Sort(p.extra)
}

// alone says whether a file may be taken as it is: one of a checkpoint must have no other name.
func (p *pull) alone(fi fs.FileInfo) bool {
	s, ok := fi.Sys().(*syscall.Stat_t)
	return p.plan.Kind != api.KindCheckpoint || ok && s.Nlink == 1
}

// list returns what lies below a folder, by name, apart from folders. A folder that does not exist is empty.
func list(dir string) (map[string]fs.FileInfo, error) {
	there := map[string]fs.FileInfo{}
	err := staging.Walk(dir, func(name string, e fs.DirEntry) error {
		fi, err := e.Info()
		there[name] = fi
		return err
	})
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return there, err
}

func untouched(r *staging.Record, there map[string]fs.FileInfo) bool {
	return !slices.ContainsFunc(r.Files, func(f staging.File) bool {
		return !f.Untouched(there[f.Name])
	})
}

// some joins a few of many names.
func some(names []string) string {
	if more := len(names) - maxNamed; more > 0 {
		return strings.Join(names[:maxNamed], ", ") + fmt.Sprintf(" and %d more", more)
	}
	return strings.Join(names, ", ")
}

func (p *pull) run(ctx context.Context) error {
	if err := p.area.Check(p.plan.Record); err != nil {
		return err
	}
	if err := p.area.Begin(p.plan.Record); err != nil {
		return err
	}
	have, err := p.adopt(ctx)
	if err != nil {
		return err
	}
	switch {
	case p.done.Reused == len(p.plan.Files) && len(p.extra) == 0:
		p.done.Already = true
		p.done.Record, err = p.area.Confirm(p.plan.Record)
		return err
	case p.occupied && !p.may:
		return p.noRecord()
	}
	if err := p.fetch(ctx, have); err != nil {
		return err
	}
	if err := p.identity(); err != nil {
		return err
	}
	replace := p.may
	if err := p.look(); err != nil { // much may have happened at the target meanwhile
		return err
	}
	p.done.Already = false
	p.done.Record, err = p.area.Publish(p.plan.Record, replace)
	return err
}

// adopt takes the files at the target that match into the area, and returns their digests.
func (p *pull) adopt(ctx context.Context) (map[identity.Digest]bool, error) {
	have := map[identity.Digest]bool{}
	p.damaged = map[identity.Digest]string{}
	var found []staging.Found
	for _, f := range p.use {
		p.o.Watch.tell(Event{Step: Planned, Phase: PhaseVerify, File: f.Name, Total: f.Size})
		found = append(found, staging.Found{File: f, Path: filepath.Join(p.done.Target, filepath.FromSlash(f.Name))})
	}
	taken, err := p.area.Adopt(ctx, found, func(i int, done int64) {
		p.o.Watch.tell(Event{Step: Moved, Phase: PhaseVerify, File: found[i].Name, Bytes: done, Total: found[i].Size})
	})
	if err != nil {
		return nil, err
	}
	for i, f := range found {
		if taken[i] {
			have[f.Digest] = true
			p.done.Reused++
		} else {
			p.damaged[f.Digest] = f.Path
		}
		p.o.Watch.tell(Event{Step: Done, Phase: PhaseVerify, File: f.Name, Bytes: f.Size, Total: f.Size})
	}
	return have, nil
}

// fetch receives what is missing, if there is room for it.
func (p *pull) fetch(ctx context.Context, have map[identity.Digest]bool) error {
	files, err := p.uncached(ctx, have)
	if err != nil {
		return err
	}
	if err := p.room(files); err != nil {
		return err
	}
	if err := p.available(ctx, files); err != nil {
		return err
	}
	if files, err = p.bring(ctx, files); err != nil {
		return err
	}
	done, err := fetch.Files(ctx, p.area, fetch.Source{Client: p.c, Repo: p.plan.Repository}, files, fetch.Options{
		Jobs: p.o.Jobs, Rate: p.o.Rate, Mirrors: p.mirrors(), Watch: received{p.o.Watch},
	})
	p.done.Received += done.Received
	p.done.Resumed, p.done.Adopted = done.Resumed, done.Adopted
	var failed *FetchError
	if errors.As(err, &failed) {
		failed.Total = len(p.plan.Files)
	}
	return err
}

// bring has the caller bring what it likes of the files, and returns the others.
func (p *pull) bring(ctx context.Context, files []fetch.File) ([]fetch.File, error) {
	if p.o.Bring == nil || len(files) == 0 {
		return files, nil
	}
	var missing []staging.File
	for _, f := range files {
		missing = append(missing, f.File)
	}
	if err := p.o.Bring(ctx, missing, p.area); err != nil {
		return nil, err
	}
	return slices.DeleteFunc(files, func(f fetch.File) bool {
		if !p.area.Has(f.Digest) {
			return false
		}
		p.done.Received += f.Size
		if states := Midstates(ctx, p.c, f.File); states != nil {
			p.area.KeepMidstates(states)
		}
		return true
	}), nil
}

// room checks that the disk has it: that of the target, and that of the cache.
func (p *pull) room(files []fetch.File) error {
	var here, cached int64
	for _, f := range files {
		through := f.Place != nil && !p.area.Begun(f.Digest, f.Size)
		if through {
			cached += p.o.Cache.Missing(f.File)
		}
		if !through || !p.links() {
			here += p.area.Missing(f.Digest, f.Size)
		}
	}
	free, err := p.area.Free()
	if err == nil && here > free {
		err = &SpaceError{filepath.Dir(p.done.Target), here, free}
	}
	if err != nil || cached == 0 {
		return err
	}
	if free, err = p.o.Cache.Free(); err == nil && cached > free {
		err = &SpaceError{p.o.Cache.Dir(), cached, free}
	}
	return err
}

func (p *pull) mirrors() (all []Mirror) {
	for _, m := range p.o.Mirrors {
		if m.Repo == "" {
			m.Repo = p.plan.Repository
		}
		all = append(all, m)
	}
	return all
}

// received tells a Watch how files come in.
type received struct{ watch Watch }

func (r received) Planned(file string, total int64) {
	r.watch.tell(Event{Step: Planned, Phase: PhaseDownload, File: file, Total: total})
}

func (r received) Moved(file string, done, total int64) {
	r.watch.tell(Event{Step: Moved, Phase: PhaseDownload, File: file, Bytes: done, Total: total})
}

func (r received) Done(file string, total int64) {
	r.watch.tell(Event{Step: Done, Phase: PhaseDownload, File: file, Bytes: total, Total: total})
}

func (r received) Noted(file, note string) { r.watch.tell(Event{Step: Noted, File: file, Note: note}) }

// available asks whether the registry can give the shards among files. One that does not know, as it is none of this
// project, will tell when it is asked for the bytes.
func (p *pull) available(ctx context.Context, files []fetch.File) error {
	if p.plan.Aggregate.IsZero() || len(files) == 0 {
		return nil
	}
	base, err := p.c.BasePage(ctx, p.plan.Aggregate, "", 1)
	if err != nil {
		return context.Cause(ctx)
	}
	var bad []staging.File
	for _, f := range files {
		if slices.Contains(base.UnavailableShards, f.Digest) {
			bad = append(bad, f.File)
		}
	}
	if len(bad) == 0 {
		return nil
	}
	return &UnavailableError{p.c.Host(), p.plan.Aggregate, bad}
}

// identity makes sure that the files received are the base that was asked for.
func (p *pull) identity() error {
	if p.plan.NoBase != nil {
		return nil
	}
	shards := make([]identity.Shard, 0, len(p.plan.Base.Shards))
	for _, s := range p.plan.Base.Shards {
		i, ok := slices.BinarySearchFunc(p.plan.Files, s.Filename, func(f staging.File, name string) int {
			return cmp.Compare(f.Name, name)
		})
		if ok {
			f := p.plan.Files[i]
			shards = append(shards, identity.Shard{Filename: f.Name, Size: uint64(f.Size), Digest: f.Digest})
		}
	}
	m, err := identity.New(shards)
	if err == nil && m.Aggregate != p.plan.Aggregate {
		err = fmt.Errorf("the files are base %s, not %s: %w", m.Aggregate, p.plan.Aggregate, client.ErrMismatch)
	}
	return err
}
