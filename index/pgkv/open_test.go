package pgkv

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/index"
	"github.com/kiln-registry/kiln-registry/index/boltkv"
	"github.com/kiln-registry/kiln-registry/internal/testpg"
)

// TestMigrateAtOnce: many processes may open an empty database at once, and one of a later version is refused.
func TestMigrateAtOnce(t *testing.T) {
	database := testpg.Shared(t).Database(t)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			kv, err := Open(t.Context(), database, Options{Conns: 2})
			if err != nil {
				t.Error(err)
				return
			}
			kv.Close()
		})
	}
	wg.Wait()
	got := testpg.Exec(t, database, "select string_agg(n::text, ',') from kiln.version")
	if got != fmt.Sprint(len(migrations)) {
		t.Errorf("version %q", got)
	}
	testpg.Exec(t, database, "update kiln.version set n = 99")
	_, err := Open(t.Context(), database, Options{})
	if !errors.Is(err, index.ErrFormat) || !strings.Contains(err.Error(), "99") {
		t.Errorf("tables of a later version: %v", err)
	}
}

// TestLimitedUser: an administrator may have made the schema for a user who may not make one.
func TestLimitedUser(t *testing.T) {
	database := testpg.Shared(t).Database(t)
	user := "limited_" + filepath.Base(database)[5:13]
	testpg.Exec(t, database, fmt.Sprintf("create user %s password 'x y'; create schema kiln authorization %[1]s", user))
	t.Cleanup(func() { testpg.Exec(t, database, "drop owned by "+user+"; drop user "+user) })
	file := filepath.Join(t.TempDir(), "password")
	if err := os.WriteFile(file, []byte("x y\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	as, _ := url.Parse(database)
	as.User = url.User(user)
	kv, err := Open(t.Context(), as.String(), Options{PasswordFile: file})
	if err != nil {
		t.Fatal(err)
	}
	kv.Close()
}

func TestBadURLs(t *testing.T) {
	for name, u := range map[string]string{
		"no URL":           "host=x password=secret",
		"another scheme":   "mysql://kiln:secret@h/db",
		"a bad port":       "postgres://kiln:secret@h:port/db",
		"a raw percent":    "postgres://kiln:secret%@h/db",
		"a raw slash":      "postgres://kiln:sec/secret@h/db",
		"a bad parameter":  "postgres://kiln:secret@h/db?connect_timeout=soon",
		"a bad attribute":  "postgres://h/db?password=secret&target_session_attrs=none",
		"a bad query":      "postgres://kiln:secret@h/db?a=%zz",
		"nobody there":     "postgres://kiln:secret@127.0.0.1:1,127.0.0.1:2/db",
		"a wrong password": strings.Replace(testpg.Shared(t).URL("postgres"), testpg.Password(), "secret", 1),
	} {
		_, err := Open(t.Context(), u, Options{})
		if err == nil || strings.Contains(err.Error(), "secret") || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v", name, err)
		}
		if down := name == "nobody there" || name == "a wrong password"; down != errors.Is(err, index.ErrUnavailable) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestDefaults(t *testing.T) {
	c, err := configure("postgres://kiln@h1,h2:6000,h3/db", Options{})
	if err != nil {
		t.Fatal(err)
	}
	hosts := []string{fmt.Sprint(c.ConnConfig.Host, c.ConnConfig.Port)}
	for _, f := range c.ConnConfig.Fallbacks {
		hosts = append(hosts, fmt.Sprint(f.Host, f.Port))
	}
	if hosts = slices.Compact(hosts); !slices.Equal(hosts, []string{"h15432", "h26000", "h35432"}) {
		t.Errorf("hosts %v", hosts)
	}
	if c.ConnConfig.ConnectTimeout != 2*time.Second || c.ConnConfig.ValidateConnect == nil || c.MaxConns != conns {
		t.Errorf("%v to connect, %d connections", c.ConnConfig.ConnectTimeout, c.MaxConns)
	}
	c, err = configure("postgres://h/db?connect_timeout=7&pool_max_conns=3&target_session_attrs=any", Options{})
	if err != nil || c.ConnConfig.ConnectTimeout != 7*time.Second || c.ConnConfig.ValidateConnect != nil ||
		c.MaxConns != 3 {
		t.Errorf("what the URL says does not hold: %v", err)
	}
}

// TestLostBetween: connections that the server closed while nobody used them are replaced, and nobody is told.
func TestLostBetween(t *testing.T) {
	database := testpg.Shared(t).Database(t)
	kv, _ := opened(t, database, Options{})
	for i := range 3 {
		if err := kv.Update(t.Context(), func(x index.Txn) error { return x.Put([]byte{byte(i)}, nil) }); err != nil {
			t.Error(err)
		}
		testpg.Exec(t, database, "select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database()"+
			" and pid <> pg_backend_pid()")
		if err := kv.View(t.Context(), read("a")); err != nil {
			t.Error(err)
		}
		testpg.Exec(t, database, "select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database()"+
			" and pid <> pg_backend_pid()")
	}
}

// TestLostWithin: an update whose connection is lost before its commit runs again.
func TestLostWithin(t *testing.T) {
	database := testpg.Shared(t).Database(t)
	kv, _ := opened(t, database, Options{})
	runs := 0
	err := kv.Update(t.Context(), func(x index.Txn) error {
		if _, err := x.Get([]byte("a")); err != nil {
			return err
		}
		if runs++; runs == 1 {
			testpg.Exec(t, database, "select pg_terminate_backend(pid) from pg_stat_activity"+
				" where datname = current_database() and pid <> pg_backend_pid()")
		}
		_, err := x.Get([]byte("b"))
		return errors.Join(err, x.Put([]byte("a"), fmt.Append(nil, runs)))
	})
	if err != nil || runs != 2 {
		t.Errorf("ran %d times: %v", runs, err)
	}
}

// TestContextEnds: a read ends when its context does.
func TestContextEnds(t *testing.T) {
	database := testpg.Shared(t).Database(t)
	kv, _ := opened(t, database, Options{})
	for _, call := range []func(context.Context, func(index.Txn) error) error{kv.View, kv.Update} {
		ctx, cancel := context.WithCancel(t.Context())
		err := call(ctx, func(x index.Txn) error {
			cancel()
			_, err := x.Get([]byte("a"))
			return err
		})
		if !errors.Is(err, context.Canceled) {
			t.Errorf("%v", err)
		}
	}
}

// TestSkew: two updates that each write what the other one reads do not both hold.
func TestSkew(t *testing.T) {
	kv, _ := opened(t, testpg.Shared(t).Database(t), Options{})
	a, b := []byte("a"), []byte("b")
	for range 50 {
		err := kv.Update(t.Context(), func(x index.Txn) error { return errors.Join(x.Delete(a), x.Delete(b)) })
		if err != nil {
			t.Fatal(err)
		}
		both := make(chan int, 2)
		var wg sync.WaitGroup
		for _, k := range [][2][]byte{{a, b}, {b, a}} {
			wg.Go(func() {
				wrote := 0
				err := kv.Update(t.Context(), func(x index.Txn) error {
					v, err := x.Get(k[0])
					if wrote = 0; err == nil && v == nil {
						wrote, err = 1, x.Put(k[1], []byte("mine"))
					}
					return err
				})
				if err != nil {
					t.Error(err)
				}
				both <- wrote
			})
		}
		wg.Wait()
		if n := <-both + <-both; n != 1 {
			t.Fatalf("%d of two wrote, want one", n)
		}
	}
}

// TestMove: what is exported from a bolt index and imported into one on PostgreSQL is the same, and back.
func TestMove(t *testing.T) {
	bolt := func() *index.Index {
		kv, err := boltkv.Open(filepath.Join(t.TempDir(), "index.db"), boltkv.Options{})
		if err != nil {
			t.Fatal(err)
		}
		ix, err := index.New(t.Context(), kv)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { ix.Close() })
		return ix
	}
	old := bolt()
	_, moved := opened(t, testpg.Shared(t).Database(t), Options{})
	back := bolt()
	var entries []index.Entry
	for i := range 300 {
		base := identity.Aggregate(identity.Sum([]byte{byte(i % 3)}))
		p := artifact(fmt.Sprint("models/", i%5), uint64(i+1), base, i%40)
		e := index.Entry{PutManifest: p}
		if i%7 == 0 {
			e.Tags = []index.PutTag{{Repo: p.Repo, Tag: fmt.Sprint("v", i), Digest: p.Digest, Seq: p.Seq}}
			if err := old.Apply(t.Context(), p, e.Tags[0]); err != nil {
				t.Fatal(err)
			}
		} else if err := old.Apply(t.Context(), p); err != nil {
			t.Fatal(err)
		}
		entries = append(entries, e)
	}
	each := func(yield func(index.Entry, error) bool) {
		for _, e := range entries {
			if !yield(e, nil) {
				return
			}
		}
	}
	want := exported(t, old)
	for name, ix := range map[string]*index.Index{"PostgreSQL": moved, "bolt": back} {
		if err := ix.Import(t.Context(), t.TempDir(), each); err != nil {
			t.Fatal(err)
		}
		if got := exported(t, ix); !slices.Equal(got, want) || len(got) != 300+43 {
			t.Errorf("%s has %d rows, want the %d of before", name, len(got), len(want))
		}
	}
}

func exported(t *testing.T, ix *index.Index) (rows []string) {
	for row, err := range ix.Export(t.Context()) {
		if err != nil {
			t.Fatal(err)
		}
		rows = append(rows, fmt.Sprintf("%+v", row))
	}
	return rows
}
