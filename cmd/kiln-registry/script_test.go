package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/cmd/kiln-registry/internal/home"
	"github.com/kiln-registry/kiln-registry/internal/testregistry"
	"github.com/kiln-registry/kiln-registry/internal/tests3"
)

// TestScripts runs one script per promise. Each may use what is below $S3 in a bucket, as "$S3/NAME$AT".
func TestScripts(t *testing.T) {
	s3 := tests3.Shared(t)
	bucket := s3.Bucket(t)
	testscript.Run(t, testscript.Params{
		Dir: "testdata",
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"exits": testregistry.Exits, "serve": scriptServe, "halt": scriptHalt, "kill9": scriptKill, "push": scriptPush,
			"get": scriptGet, "damage": scriptDamage, "log": scriptLog, "request": scriptRequest,
			"upkept": scriptUpkept, "digest": scriptDigest, "spoil": scriptSpoil,
		},
		Setup: func(e *testscript.Env) error {
			e.Values[serverKey{}] = new(*process)
			e.Setenv("S3", "s3://"+bucket+"/"+filepath.Base(e.WorkDir))
			e.Setenv("AT", "?endpoint=http://"+s3.Endpoint()+"&region="+s3.Region)
			e.Setenv("AWS_ACCESS_KEY_ID", s3.AccessKey)
			e.Setenv("AWS_SECRET_ACCESS_KEY", s3.SecretKey)
			e.Setenv("HOME", e.WorkDir)
			e.Setenv("KILN_LANES", os.Getenv("KILN_LANES"))
			return nil
		},
	})
}

type serverKey struct{}

// scriptTest is a script as the test that its server belongs to.
type scriptTest struct{ *testscript.TestScript }

func (scriptTest) Helper()             {}
func (s scriptTest) Fatal(args ...any) { s.Fatalf("%s", fmt.Sprint(args...)) }
func (s scriptTest) Cleanup(f func())  { s.Defer(f) }

func running(ts *testscript.TestScript) *process { return *ts.Value(serverKey{}).(**process) }

// scriptServe is "serve ARG...": it starts a server, which takes the place of an earlier one.
func scriptServe(ts *testscript.TestScript, _ bool, args []string) {
	cmd := program(context.Background(), ts.MkAbs("."), append([]string{"serve", "--addr", "127.0.0.1:0"}, args...)...)
	for _, name := range []string{
		"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "HOME", "KILN_STORE", "KILN_STATE_DIR", "KILN_INIT", "KILN_IDLE_TIMEOUTS",
		"KILN_TOKEN", "KILN_REGISTRY", "KILN_CONFIG",
	} {
		cmd.Env = append(cmd.Env, name+"="+ts.Getenv(name))
	}
	s := &process{t: scriptTest{ts}, cmd: cmd, log: new(bytes.Buffer)}
	*ts.Value(serverKey{}).(**process) = s.start()
}

// scriptHalt is "halt": SIGTERM.
func scriptHalt(ts *testscript.TestScript, _ bool, _ []string) { running(ts).stop() }

// scriptRequest is "request STATUS METHOD PATH [PATTERN]", and the body or a header of the answer matches.
func scriptRequest(ts *testscript.TestScript, neg bool, args []string) {
	status, err := strconv.Atoi(args[0])
	ts.Check(err)
	header, body := running(ts).do(status, args[1], args[2], []byte("{}"), "Content-Type", manifestType)
	if len(args) == 3 {
		return
	}
	var answer bytes.Buffer
	ts.Check(header.Write(&answer))
	re, err := regexp.Compile("(?m)" + args[3])
	ts.Check(err)
	if answer.WriteString("\r\n"); re.Match(append(answer.Bytes(), body...)) == neg {
		ts.Fatalf("%v: %s%s", args, &answer, body)
	}
}

// scriptUpkept is "upkept PATH PATTERN": it waits until what the administration socket of ./kiln-data says matches.
func scriptUpkept(ts *testscript.TestScript, _ bool, args []string) {
	p, err := home.ParsePlace("--store", ts.MkAbs("kiln-data"))
	ts.Check(err)
	re, err := regexp.Compile(args[1])
	ts.Check(err)
	said := []byte{}
	for deadline := time.Now().Add(time.Minute); !re.Match(said); {
		if time.Now().After(deadline) {
			ts.Fatalf("it still says %s", said)
		}
		resp, err := home.Home{Place: p, State: p.Folder}.Ask(context.Background(), http.MethodGet, args[0])
		ts.Check(err)
		said, err = io.ReadAll(resp.Body)
		ts.Check(err)
		ts.Check(resp.Body.Close())
	}
}

// scriptLog is "log PATTERN": the server, which has ended, wrote a line that matches.
func scriptLog(ts *testscript.TestScript, neg bool, args []string) {
	re, err := regexp.Compile(args[0])
	ts.Check(err)
	if s := running(ts); s.cmd.ProcessState == nil || re.Match(s.log.Bytes()) == neg {
		ts.Fatalf("log %s: %s", args[0], s.log)
	}
}

// scriptKill is "kill9".
func scriptKill(ts *testscript.TestScript, _ bool, _ []string) { running(ts).kill() }

// scriptPush is "push REPOSITORY TAG BYTES": a base of one shard whose content differs with the bytes.
func scriptPush(ts *testscript.TestScript, _ bool, args []string) {
	running(ts).push(args[0], args[1], args[2])
}

// scriptGet is "get STATUS REPOSITORY TAG".
func scriptGet(ts *testscript.TestScript, _ bool, args []string) {
	status, err := strconv.Atoi(args[0])
	ts.Check(err)
	running(ts).do(status, "GET", api.PathManifest(args[1], args[2]), nil)
}

// scriptDigest is "digest FILE": it sets DIGEST to the first one in a file.
func scriptDigest(ts *testscript.TestScript, _ bool, args []string) {
	ts.Setenv("DIGEST", regexp.MustCompile("sha256:[0-9a-f]{64}").FindString(ts.ReadFile(args[0])))
}

// scriptSpoil is "spoil FILE": it changes a byte in the middle of a file.
func scriptSpoil(ts *testscript.TestScript, _ bool, args []string) {
	b := []byte(ts.ReadFile(args[0]))
	b[len(b)/2] ^= 1
	ts.Check(os.WriteFile(ts.MkAbs(args[0]), b, 0o644))
}

// scriptDamage is "damage FOLDER": it changes a byte of the largest blob of the store in a folder.
func scriptDamage(ts *testscript.TestScript, _ bool, args []string) {
	largest, size := "", int64(0)
	ts.Check(filepath.WalkDir(filepath.Join(ts.MkAbs(args[0]), "blobs"), func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		i, err := e.Info()
		if err == nil && i.Size() > size {
			largest, size = path, i.Size()
		}
		return err
	}))
	b, err := os.ReadFile(largest)
	ts.Check(err)
	b[len(b)-1] ^= 1
	ts.Check(os.Remove(largest))
	ts.Check(os.WriteFile(largest, b, 0o444))
}
