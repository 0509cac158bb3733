package fetch_test

import (
	"bytes"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/lanes"
	"github.com/kiln-registry/kiln-registry/transfer/fetch"
)

const (
	quarter = 4 * mib
	shortly = seg - mib/4 // bytes of a segment before the last part of it
)

// lie puts a damaged form of a file beside the target.
func lie(t *testing.T, damaged []byte) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "damaged")
	if err := os.WriteFile(path, damaged, 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

// repair fetches b into a new folder, or dir if that is not empty, with the help of a damaged form of it.
func repair(t *testing.T, dir string, p *place, o fetch.Options, b []byte, damaged string) (
	fetch.Result, string, error,
) {
	t.Helper()
	if dir == "" {
		dir = target(t)
	}
	all, _ := files(b)
	all[0].Damaged = damaged
	return get(t, dir, p.source(client.Options{}), o, all, b)
}

// TestDamagedBytes: of a segment that is damaged on the disk no more comes than up to the part with the last wrong
// byte.
func TestDamagedBytes(t *testing.T) {
	b := random(4*seg+6*mib, 1)
	const s = 2 * seg
	tests := map[string]struct {
		at   []int
		want int64
	}{
		"first byte":              {[]int{s}, quarter},
		"end of a part":           {[]int{s + quarter - 1}, quarter},
		"second quarter":          {[]int{s + quarter}, 2 * quarter},
		"third quarter":           {[]int{s + 3*quarter - 1}, 3 * quarter},
		"fourth quarter":          {[]int{s + 3*quarter}, shortly},
		"before the last part":    {[]int{s + shortly - 1}, shortly},
		"last part":               {[]int{s + shortly}, seg},
		"last byte":               {[]int{s + seg - 1}, seg},
		"first byte of the file":  {[]int{0}, quarter},
		"short segment":           {[]int{4 * seg}, quarter},
		"end of short segment":    {[]int{4*seg + 6*mib - mib/4 - 1}, 6*mib - mib/4},
		"last byte of the file":   {[]int{len(b) - 1}, 6 * mib},
		"two in one part":         {[]int{s + 1, s + mib}, quarter},
		"two in one segment":      {[]int{s + 1, s + 9*mib}, 3 * quarter},
		"ends of one segment":     {[]int{s, s + seg - 1}, seg},
		"two segments":            {[]int{seg + 5, 3*seg + 9*mib}, quarter + 3*quarter},
		"more segments than not":  {[]int{5, seg + 5, 3*seg + 5}, 3 * seg},
		"two segments in a row":   {[]int{seg + 7*mib, s}, 2*quarter + quarter},
		"nothing":                 {nil, 0},
		"first and last segments": {[]int{3, 4*seg + 5*mib}, quarter + 6*mib - mib/4},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			p := newPlace(t, b)
			damaged := flipped(b, tt.at...)
			path := lie(t, damaged)
			done, notes, err := repair(t, "", p, fetch.Options{}, b, path)
			want := fetch.Result{Received: tt.want, Adopted: int64(len(b)) - tt.want}
			if err != nil || p.bytes() != tt.want || done != want {
				t.Errorf("%+v, %d bytes sent, want %d, %v\n%s", done, p.bytes(), tt.want, err, notes)
			}
			if strings.Contains(notes, "match") {
				t.Errorf("somebody is blamed: %s", notes)
			}
			if n := p.opened.Load(); len(tt.at) == 1 && n != 1 {
				t.Errorf("%d connections", n)
			}
			if got, err := os.ReadFile(path); err != nil || !bytes.Equal(got, damaged) {
				t.Errorf("the damaged file was changed, %v", err)
			}
		})
	}
}

// TestDamagedLength: a file of another length is no damaged form of the file.
func TestDamagedLength(t *testing.T) {
	b := random(3*seg, 1)
	for _, damaged := range [][]byte{b[:2*seg+5], append(bytes.Clone(b), 0), nil} {
		p := newPlace(t, b)
		done, notes, err := repair(t, "", p, fetch.Options{}, b, lie(t, damaged))
		if err != nil || done != (fetch.Result{Received: int64(len(b))}) || p.bytes() != int64(len(b)) {
			t.Errorf("%d bytes: %+v, %d bytes sent, %v\n%s", len(damaged), done, p.bytes(), err, notes)
		}
	}
}

// TestDamagedBreaks: parts that break off go on where they were.
func TestDamagedBreaks(t *testing.T) {
	b := random(3*seg, 1)
	p := newPlace(t, b)
	p.onBlob(func(w http.ResponseWriter, r *http.Request, b []byte) bool {
		serve(&cutter{w, 3 * mib}, r, b)
		return true
	})
	done, notes, err := repair(t, "", p, fetch.Options{}, b, lie(t, flipped(b, seg+9*mib)))
	if err != nil || done.Received != 3*quarter || p.bytes() != 3*quarter {
		t.Errorf("%+v, %d bytes sent, %v\n%s", done, p.bytes(), err, notes)
	}
}

// TestDamagedAndLies: who sends wrong bytes of a damaged segment is known when all of it came, and then it comes whole.
func TestDamagedAndLies(t *testing.T) {
	b := random(3*seg, 1)
	damaged := lie(t, flipped(b, seg+5))
	bad := func(at int, times int32) func(http.ResponseWriter, *http.Request, []byte) bool {
		var n atomic.Int32
		wrong := flipped(b, at)
		return func(w http.ResponseWriter, r *http.Request, _ []byte) bool {
			if n.Add(1) > times {
				return false
			}
			serve(w, r, wrong)
			return true
		}
	}
	for name, tt := range map[string]struct {
		at                     int
		fromMirror, fromServer int64
		want                   string
	}{
		"where it is asked":         {seg + 6, seg, seg, "is not asked any more: segment 1,"},
		"where it need not be":      {seg + 9*mib, quarter, 0, ""},
		"in the place of the other": {seg + 5, seg, seg, "is not asked any more: segment 1,"},
	} {
		t.Run("mirror, "+name, func(t *testing.T) {
			p, m := newPlace(t, b), newPlace(t, b)
			m.onBlob(bad(tt.at, 100))
			o := fetch.Options{Mirrors: []fetch.Source{m.mirror(client.Options{})}}
			done, notes, err := repair(t, "", p, o, b, damaged)
			if err != nil || m.bytes() != tt.fromMirror || p.bytes() != tt.fromServer ||
				done.Received != tt.fromMirror+tt.fromServer {
				t.Errorf("%+v, %d bytes of the mirror, %d of the registry, %v", done, m.bytes(), p.bytes(), err)
			}
			if !strings.Contains(notes, tt.want) || tt.want == "" && strings.Contains(notes, m.host) {
				t.Errorf("notes: %s", notes)
			}
		})
	}
	t.Run("mirror dies", func(t *testing.T) {
		p, m := newPlace(t, b), newPlace(t, b)
		m.onBlob(func(w http.ResponseWriter, r *http.Request, b []byte) bool {
			serve(&cutter{w, mib}, r, flipped(b, seg+7))
			return true
		})
		o := fetch.Options{Mirrors: []fetch.Source{m.mirror(client.Options{})}}
		_, notes, err := repair(t, "", p, o, b, damaged)
		if err != nil || m.bytes() != mib || p.bytes() != quarter {
			t.Errorf("%d bytes of the mirror, %d of the registry, %v\n%s", m.bytes(), p.bytes(), err, notes)
		}
	})
	t.Run("registry once", func(t *testing.T) {
		p := newPlace(t, b)
		p.onBlob(bad(seg+6, 5)) // all parts
		done, notes, err := repair(t, "", p, fetch.Options{}, b, damaged)
		if err != nil || done.Received != 2*seg || p.bytes() != 2*seg || !strings.Contains(notes, "from "+p.host) {
			t.Errorf("%+v, %d bytes sent, %v\n%s", done, p.bytes(), err, notes)
		}
	})
	t.Run("registry always", func(t *testing.T) {
		p := newPlace(t, b)
		p.onBlob(bad(seg+6, 1000))
		_, notes, err := repair(t, "", p, fetch.Options{}, b, damaged)
		var m *fetch.MismatchError
		if !errors.As(err, &m) || m.Got != identity.Sum(flipped(b, seg+6)) {
			t.Errorf("%v\n%s", err, notes)
		}
	})
}

// TestDamagedKill: what is kept of a damaged segment when the process is killed is what was fetched of it, and no more.
func TestDamagedKill(t *testing.T) {
	b := random(3*seg, 1)
	damaged := lie(t, flipped(b, seg+9*mib))
	for _, enough := range []int64{mib, 6 * mib, 10 * mib} {
		for name, left := range map[string]string{"": "", " with the damaged file": damaged} {
			t.Run(fmt.Sprintf("after %d MiB, continued%s", enough/mib, name), func(t *testing.T) {
				p := newPlace(t, b)
				dir := target(t)
				killed(t, p, b, dir, damaged, enough)
				done, notes, err := repair(t, dir, p, fetch.Options{}, b, left)
				if err != nil || done.Received+done.Resumed+done.Adopted != int64(len(b)) || p.bytes() != done.Received {
					t.Errorf("%+v, %d bytes sent of %d, %v", done, p.bytes(), len(b), err)
				}
				begun := done.Resumed - 2*seg
				if most := (enough + 2*mib); begun < 0 || begun > most || enough > 9*mib && begun < 8*mib {
					t.Errorf("%d bytes of the segment were there, at most %d were sent", begun, most)
				}
				want := seg - begun
				if left != "" {
					want = 3*quarter - begun
				}
				if done.Received != want || strings.Contains(notes, "match") {
					t.Errorf("%d bytes came, want %d\n%s", done.Received, want, notes)
				}
			})
		}
	}
}

// TestLyingMidstatesKeep: where midstates are wrong, segments that passed by others come no second time, and the digest
// has the last word on them.
func TestLyingMidstatesKeep(t *testing.T) {
	b := random(6*seg, 1)
	d := identity.Sum(b)
	wrong := flipped(b, 4*seg+9)
	for name, tt := range map[string]struct {
		form  []byte
		there []byte // the file on the disk
		want  int64  // bytes that come
		notes string
	}{
		// 2 and 3 do not match. 2 is asked for in steps and then whole, and both come in order.
		"an edge": {formOf(b, d, func(e []lanes.State) { e[2][7] ^= 1 }), b, 4 * seg, "comes in order"},
		// 0, 1 and 5 do not match, and 4 does, which is wrong: all three come in order, and then the file anew.
		"a segment": {formOf(wrong, d, func(e []lanes.State) { e[0][7] ^= 1 }), wrong, 11 * seg, "digest mismatch"},
	} {
		t.Run(name, func(t *testing.T) {
			p := newPlace(t, b)
			p.forms[d] = tt.form
			done, notes, err := repair(t, "", p, fetch.Options{Jobs: 1}, b, lie(t, tt.there))
			if err != nil || done.Received != tt.want || p.bytes() != tt.want || !strings.Contains(notes, tt.notes) {
				t.Errorf("%+v, %d bytes sent, want %d, %v\n%s", done, p.bytes(), tt.want, err, notes)
			}
		})
	}
}
