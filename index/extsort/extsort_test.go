package extsort

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"testing"
)

// TestSorter sorts pairs, some of them twice, in memory and by runs of several sizes, down to one pair each.
func TestSorter(t *testing.T) {
	for _, size := range []int{0, 1, 100, 4000} {
		dir := t.TempDir()
		s := &Sorter{Dir: dir, run: size}
		random := rand.New(rand.NewPCG(1, 2))
		var want []string
		for range 500 {
			k := fmt.Sprintf("key %d", random.IntN(400))
			v := fmt.Sprintf("value of %s%*s", k, random.IntN(50), "")
			want = append(want, k+"="+v)
			if err := s.Add([]byte(k), []byte(v)); err != nil {
				t.Fatal(err)
			}
		}
		var got, keys []string
		err := s.Each(func(k, v []byte) error {
			keys, got = append(keys, string(k)), append(got, string(k)+"="+string(v))
			return nil
		})
		if err != nil || !slices.IsSorted(keys) {
			t.Errorf("runs of %d: sorted %v, %v", size, slices.IsSorted(keys), err)
		}
		slices.Sort(want)
		slices.Sort(got)
		if !slices.Equal(got, want) {
			t.Errorf("runs of %d: %d pairs, want %d", size, len(got), len(want))
		}
		if size > 0 && len(s.runs) < 2 {
			t.Errorf("runs of %d bytes: there are %d", size, len(s.runs))
		}
		if err := s.Close(); err != nil {
			t.Error(err)
		}
		if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
			t.Errorf("left: %v, %v", left, err)
		}
	}
}

func TestEmpty(t *testing.T) {
	var s Sorter
	if err := s.Each(func(k, v []byte) error { return errors.New("a pair") }); err != nil {
		t.Error(err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}

// TestErrors: an error of visit ends the walk, and a folder that is not there is an error.
func TestErrors(t *testing.T) {
	stop := errors.New("stop")
	for _, size := range []int{1, 1000} {
		s := &Sorter{Dir: t.TempDir(), run: size}
		for i := range 10 {
			if err := s.Add([]byte{byte(i)}, nil); err != nil {
				t.Fatal(err)
			}
		}
		n := 0
		err := s.Each(func(k, v []byte) error {
			if n++; n == 3 {
				return stop
			}
			return nil
		})
		if err != stop || n != 3 {
			t.Errorf("%v after %d pairs", err, n)
		}
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}
	s := &Sorter{Dir: t.TempDir() + "/absent", run: 1}
	if err := errors.Join(s.Add([]byte("a"), nil), s.Add([]byte("b"), nil)); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
}
