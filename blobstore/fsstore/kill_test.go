package fsstore

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/testlanes"
)

// killSegment is the size of segments, which lets most blobs have midstates.
const killSegment = 30 << 10

// killEnv names the store in the environment of the child process that is to be killed.
const killEnv = "KILN_TEST_STORE_TO_KILL"

func TestMain(m *testing.M) {
	tests := testlanes.Use(m)
	if dir := os.Getenv(killEnv); dir != "" {
		fmt.Fprintln(os.Stderr, child(dir))
		os.Exit(1)
	}
	os.Exit(tests.Run())
}

// blobOf returns the bytes of a numbered blob, which the child pushes and the parent expects.
func blobOf(n uint64) []byte {
	b := make([]byte, n%7*50_000+100)
	rand.NewChaCha8([32]byte{byte(n), byte(n >> 8), byte(n >> 16), byte(n >> 24)}).Read(b)
	return b
}

// child works on a store until it is killed, and says what was acknowledged, one line each: "blob N", "refs WRITER N",
// "open ID N SIZE".
func child(dir string) error {
	st, err := Open(dir, Options{})
	if err != nil {
		return err
	}
	st.every, st.segment = 64<<10, killSegment
	start := uint64(time.Now().UnixNano()) % 1e6 * 1000
	var out sync.Mutex
	say := func(format string, args ...any) {
		out.Lock()
		defer out.Unlock()
		fmt.Printf(format+"\n", args...)
	}
	failed := make(chan error)
	for w := range uint64(2) {
		go func() { failed <- pushForever(st, start+w*500, say) }()
		go func() { failed <- putForever(st, w, start, say) }()
	}
	return <-failed
}

func pushForever(st *Store, n uint64, say func(string, ...any)) error {
	ctx := context.Background()
	for ; ; n++ {
		b := blobOf(n)
		u, err := st.Create(ctx, identity.Sum(b), int64(len(b)))
		if err != nil {
			return err
		}
		for off := 0; off < len(b); {
			to := min(len(b), off+70_000)
			if _, err := u.Append(ctx, int64(off), bytes.NewReader(b[off:to])); err != nil {
				return err
			}
			off = to
			say("open %s %d %d", u.ID(), n, off)
		}
		if _, err := u.Commit(ctx, identity.Sum(b)); err != nil {
			return err
		}
		say("blob %d", n)
		if err := u.Abort(ctx); err != nil {
			return err
		}
	}
}

func putForever(st *Store, writer, start uint64, say func(string, ...any)) error {
	repo := fmt.Sprint(writer)
	for n := start; ; n++ {
		r := blobstore.Ref{Repo: repo, Seq: n}
		if _, err := st.Put(context.Background(), r, r); err != nil {
			return err
		}
		say("refs %d %d", writer, n)
	}
}

// TestKill kills a process at random moments and looks at what it had acknowledged.
func TestKill(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "store")
	newStore(t, dir)
	acked := map[string]bool{}
	opened := map[string][2]uint64{} // by id: number and size
	missing := 0                     // blobs without midstates
	for range 12 {
		for line := range runAndKill(t, dir, 1+rand.IntN(60)) {
			var id string
			var n, size uint64
			if k, _ := fmt.Sscanf(line, "open %s %d %d", &id, &n, &size); k == 3 {
				opened[id] = [2]uint64{n, max(size, opened[id][1])}
			} else {
				acked[line] = true
			}
		}
		st := open(t, dir)
		st.segment = killSegment
		missing = checkKilled(t, st, acked, opened, missing)
		if err := st.Close(); err != nil {
			t.Fatal(err)
		}
		if t.Failed() {
			return
		}
	}
	if len(acked) < 30 {
		t.Errorf("only %d acknowledged operations", len(acked))
	}
}

// runAndKill starts a child, kills it after so many lines and yields all that it wrote.
func runAndKill(t *testing.T, dir string, lines int) (said map[string]bool) {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), killEnv+"="+dir)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	said = map[string]bool{}
	r := bufio.NewReader(out)
	for n := 1; ; n++ {
		line, err := r.ReadString('\n')
		if err != nil { // a last line without its end was not acknowledged
			break
		}
		if said[strings.TrimSuffix(line, "\n")] = true; n == lines {
			if err := cmd.Process.Kill(); err != nil {
				t.Fatal(err)
			}
		}
	}
	cmd.Wait()
	if stderr.Len() > 0 {
		t.Fatalf("child: %s", stderr.String())
	}
	return said
}

// checkKilled returns how many blobs lack midstates, given how many did before.
func checkKilled(
	t *testing.T, st *Store, acked map[string]bool, opened map[string][2]uint64, before int,
) (missing int) {
	t.Helper()
	groups := map[string]int{}
	for r, err := range st.Since(t.Context(), 0) {
		if err != nil {
			t.Fatal(err)
		}
		groups[fmt.Sprintf("refs %s %d", r.Repo, r.Seq)]++
	}
	for line, n := range groups {
		if n != 2 {
			t.Errorf("%q: %d refs of a group of two", line, n)
		}
	}
	for line := range acked {
		var n uint64
		if k, _ := fmt.Sscanf(line, "blob %d", &n); k == 1 {
			if _, err := st.Stat(t.Context(), identity.Sum(blobOf(n))); err != nil {
				t.Errorf("%s was acknowledged: %v", line, err)
			}
		} else if groups[line] == 0 {
			t.Errorf("%s was acknowledged", line)
		}
	}
	for i, err := range st.List(t.Context(), identity.Digest{}) {
		if err != nil {
			t.Fatal(err)
		}
		checkBlob(t, st.path(i.Digest))
		if b, err := os.ReadFile(st.path(i.Digest)); err != nil {
			t.Fatal(err)
		} else if !checkMidstates(t, st, i, b) && len(b) > killSegment {
			missing++
		}
	}
	// Only that of a commit that the kill fell into may be missing: there are two pushers.
	if missing > before+2 {
		t.Errorf("%d blobs have no midstates, before the kill it was %d", missing, before)
	}
	checkOpened(t, st, opened)
	return missing
}

// checkOpened goes on with every upload that was open when the process died.
func checkOpened(t *testing.T, st *Store, opened map[string][2]uint64) {
	t.Helper()
	for up, err := range st.Uploads(t.Context()) {
		if err != nil {
			t.Fatal(err)
		}
		u, err := st.Resume(t.Context(), up.ID)
		if err != nil {
			t.Fatal(err)
		}
		o, known := opened[up.ID]
		if !known { // nothing of it was acknowledged
			if err := u.Abort(t.Context()); err != nil {
				t.Error(err)
			}
			continue
		}
		if b := blobOf(o[0]); u.Size() < int64(o[1]) || u.Size() > int64(len(b)) {
			t.Errorf("upload %s has %d bytes, acknowledged were %d", up.ID, u.Size(), o[1])
		} else {
			if end(t, u, b); up.Blob.IsZero() && len(b) > killSegment && !checkMidstates(t, st, stat(t, st, b), b) {
				t.Errorf("upload %s was gone on with and has no midstates", up.ID)
			}
		}
		delete(opened, up.ID)
	}
	for id, o := range opened { // the others were committed, and their receipts dropped
		if _, err := st.Stat(t.Context(), identity.Sum(blobOf(o[0]))); err != nil {
			_, rerr := st.Resume(t.Context(), id)
			t.Errorf("%d bytes of upload %s were acknowledged: %v; %v", o[1], id, err, rerr)
		}
		if _, err := st.Resume(t.Context(), id); !errors.Is(err, blobstore.ErrUploadUnknown) {
			t.Errorf("upload %s: %v", id, err)
		}
	}
	clear(opened)
}
