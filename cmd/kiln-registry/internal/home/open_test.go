package home

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"strings"
	"syscall"
	"testing"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/internal/cli"
)

func TestNotReplayed(t *testing.T) {
	at := Home{Place: Place{Name: "d", Folder: "d"}, State: "d"}
	for _, c := range []struct {
		err  error
		hint string
	}{
		{api.Errorf(api.CodeUnavailable, "x"), "reindex"},
		{&net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}, "reindex"},
		{fmt.Errorf("read: %w", syscall.EIO), "check the disk"},
		{fmt.Errorf("x: %w", blobstore.ErrNoSpace), "free some space"},
		{blobstore.ErrDamaged, "backup"},
	} {
		var out bytes.Buffer
		if code := cli.Report(&out, at.NotReplayed(c.err)); code != cli.CodeDisk ||
			!strings.Contains(out.String(), c.hint) || strings.Contains(out.String(), "address") {
			t.Errorf("%v: %d: %s", c.err, code, &out)
		}
	}
	if err := at.NotReplayed(context.Canceled); cli.Code(err) != cli.CodeTryAgain {
		t.Error(err)
	}
}
