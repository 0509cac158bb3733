package testregistry

import (
	"errors"
	"os/exec"
	"strconv"
	"strings"

	"github.com/rogpeppe/go-internal/testscript"
)

// Exits is a command for test scripts: "exits CODE COMMAND ARG..." runs a command that must end with the code given and
// must not write a stack trace.
func Exits(ts *testscript.TestScript, _ bool, args []string) {
	want, err := strconv.Atoi(args[0])
	ts.Check(err)
	err = ts.Exec(args[1], args[2:]...)
	got := 0
	var x *exec.ExitError
	if errors.As(err, &x) {
		got = x.ExitCode()
	} else {
		ts.Check(err)
	}
	if got != want {
		ts.Fatalf("%v ended with %d, want %d", args[1:], got, want)
	}
	if strings.Contains(ts.ReadFile("stderr"), "goroutine ") {
		ts.Fatalf("%v wrote a stack trace", args[1:])
	}
}
