package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"

	"github.com/kiln-registry/kiln-registry/api"
)

const hostile = "a\x1b[31m\u009b2J\u202eb\u2066\u200e\x7f\u200b\u2028\u2029\ufeff\U000e0041\r\a"

// TestVisibly: nothing that a command writes, and no error of it, reaches a terminal as anything but text.
func TestVisibly(t *testing.T) {
	run := func(_ context.Context, args []string, stdout, stderr io.Writer) error {
		fmt.Fprintf(stdout, "%s\tä€😀\n", hostile)
		fmt.Fprintf(stderr, "note %s\n", hostile)
		if err := json.NewEncoder(stdout).Encode(hostile); err != nil {
			return err
		}
		return Hint(errors.New("server said "+hostile), "do "+hostile)
	}
	var stdout, stderr bytes.Buffer
	if code := visibly(t.Context(), run, nil, &stdout, &stderr); code != CodeUsage {
		t.Errorf("code %d", code)
	}
	const shown = `a\u001b[31m\u009b2J\u202eb\u2066\u200e\u007f\u200b\u2028\u2029\ufeff\udb40\udc41`
	table, line, _ := strings.Cut(stdout.String(), "\n")
	if table != shown+`\u000d\u0007`+"\tä€😀" {
		t.Errorf("stdout %q", table)
	}
	var back string
	if err := json.Unmarshal([]byte(line), &back); err != nil || back != hostile || strings.ContainsFunc(line[:len(line)-1], api.Unseen) {
		t.Errorf("JSON %q is %q, %v", line, back, err)
	}
	if got := stderr.String(); strings.Count(got, shown) != 3 || strings.ContainsAny(got, "\x1b\u009b\u202e\r") {
		t.Errorf("stderr %q", got)
	}
}

type broken struct{}

func (broken) Write([]byte) (int, error) { return 0, io.ErrClosedPipe }

func TestVisible(t *testing.T) {
	const text = "ä\u009b€\x9b\xff😀\xf0\x9f"
	const want = `ä\u009b€\x9b\xff😀\xf0\x9f`
	for size := 1; size <= len(text); size++ { // runes that are cut by the end of a Write
		var out bytes.Buffer
		v := &Visible{to: &out}
		for rest := text; rest != ""; {
			n := min(size, len(rest))
			if m, err := io.WriteString(v, rest[:n]); m != n || err != nil {
				t.Fatal(m, err)
			}
			rest = rest[n:]
		}
		if err := v.flush(); err != nil || out.String() != want {
			t.Errorf("in pieces of %d: %q, %v", size, out.String(), err)
		}
	}
	v := &Visible{to: broken{}}
	if _, err := io.WriteString(v, "x"); !errors.Is(err, io.ErrClosedPipe) {
		t.Errorf("a closed pipe: %v", err)
	}
	if Terminal(v) != nil || Terminal(&Visible{to: new(bytes.Buffer)}) != nil {
		t.Error("a buffer is a terminal")
	}
}
