package attach

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/localsock"
)

// ErrNone: no process listens on the socket.
var ErrNone = errors.New("no resident weights there")

// ErrOtherUser: the process that listens on the socket is neither of this user, nor root's, nor of Client.HolderUID.
var ErrOtherUser = errors.New("the socket belongs to another user")

// MaxHeader is the longest header of a shard that is read, in bytes: the limit of safetensors, and the 8 of its length.
const MaxHeader = 100_000_000 + 8

// Folder is where holders put their sockets unless they are told otherwise. What the environment has that is no
// absolute path is passed over, as the XDG specification wants it.
func Folder() string {
	if dir, _, _ := strings.Cut(os.Getenv("RUNTIME_DIRECTORY"), ":"); filepath.IsAbs(dir) {
		return dir
	}
	if dir := os.Getenv("XDG_RUNTIME_DIR"); filepath.IsAbs(dir) {
		return filepath.Join(dir, "kiln")
	}
	return fmt.Sprintf("/tmp/kiln-%d", os.Getuid())
}

// SocketName is the name of the socket of a base in its folder.
func SocketName(a identity.Aggregate) string { return a.Hex() + ".sock" }

// Client asks the holder that listens on a socket. It is safe for concurrent use, and holds nothing open.
type Client struct {
	Socket string // its path; empty: that of the asked aggregate in Folder, which must then be as holders make it

	// HolderUID is a user ID that the holder may have besides that of this process and 0, which is root's. Whoever that
	// is can say of any bytes that they are the base.
	HolderUID int

	named bool // by the aggregate, in Folder
}

// Status asks for what is held. The client needs a Socket for that.
func (c Client) Status(ctx context.Context) (s Status, err error) {
	return s, c.Do(ctx, http.MethodGet, PathResident, nil, &s)
}

// Document asks for the document of a base, without handles.
func (c Client) Document(ctx context.Context, a identity.Aggregate) (Document, error) {
	text, err := c.Of(a).ask(ctx, http.MethodGet, Path(a), nil, MaxDocument)
	if err != nil {
		return Document{}, err
	}
	return wanted(text, a, identity.Digest{})
}

// Header asks for the first bytes of a shard, which are not in the memory: with the shard's data after them they have
// the shard's digest. The caller checks that.
func (c Client) Header(ctx context.Context, a identity.Aggregate, shard identity.Digest) ([]byte, error) {
	return c.Of(a).ask(ctx, http.MethodGet, PathHeader(a, shard), nil, MaxHeader)
}

// Audit has the holder read all its memory back and hash it again. Damage is an *Error, CodeDamaged.
func (c Client) Audit(ctx context.Context, a identity.Aggregate) (found Audited, err error) {
	return found, c.Of(a).Do(ctx, http.MethodPost, PathAudit(a), nil, &found)
}

// Release has the holder drain, free the memory and end. It returns when that has begun.
func (c Client) Release(ctx context.Context, a identity.Aggregate) error {
	return c.Of(a).Do(ctx, http.MethodDelete, Path(a), nil, nil)
}

// Free is Release that returns when the memory is free; the holder has not ended by then.
func (c Client) Free(ctx context.Context, a identity.Aggregate) (r Released, err error) {
	return r, c.Of(a).Do(ctx, http.MethodDelete, Path(a)+"?wait=1", nil, &r)
}

// Generation waits until the generation is above a number, but not for longer than 30 seconds, and returns what it is.
func (c Client) Generation(ctx context.Context, a identity.Aggregate, after uint64) (uint64, error) {
	var body struct{ Generation uint64 }
	err := c.Of(a).Do(ctx, http.MethodGet, PathGeneration(a, after), nil, &body)
	return body.Generation, err
}

// Of is the client of the socket of a base.
func (c Client) Of(a identity.Aggregate) Client {
	if c.Socket == "" {
		c.Socket, c.named = filepath.Join(Folder(), SocketName(a)), true
	}
	return c
}

// Do sends a request and reads the answer. body and answer are encoded as JSON; both may be nil. The client needs a
// Socket. The error is an *Error where the holder refused, ErrNone or ErrOtherUser where it was not asked.
func (c Client) Do(ctx context.Context, method, path string, body, answer any) error {
	var text []byte
	var err error
	if body != nil {
		if text, err = json.Marshal(body); err != nil {
			return err
		}
	}
	if text, err = c.ask(ctx, method, path, text, MaxDocument); err != nil || answer == nil {
		return err
	}
	if err := json.Unmarshal(text, answer); err != nil {
		return fmt.Errorf("read what %s answered: %w", c.Socket, err)
	}
	return nil
}

// ask returns an answer of at most so many bytes.
func (c Client) ask(ctx context.Context, method, path string, body []byte, most int64) ([]byte, error) {
	conn, err := c.dial(ctx)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })()
	req, err := http.NewRequestWithContext(ctx, method, "http://resident"+path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	req.Close = true
	text, err := c.read(req, conn, most)
	if err != nil && ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		return nil, fmt.Errorf("ask %s: %w", c.Socket, err)
	}
	return text, nil
}

// read sends a request and reads the answer. A holder that takes no more connections answers before it was asked.
func (c Client) read(req *http.Request, conn net.Conn, most int64) ([]byte, error) {
	sent := req.Write(conn)
	resp, err := http.ReadResponse(bufio.NewReader(conn), req)
	if err != nil {
		return nil, cmp.Or(sent, err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, most+1))
	switch {
	case err != nil:
		return nil, err
	case int64(len(text)) > most:
		return nil, fmt.Errorf("an answer of more than %d bytes", most)
	case resp.StatusCode >= http.StatusMultipleChoices:
		return nil, refused(resp.StatusCode, text)
	}
	return text, nil
}

// refused is the error of an answer that is none.
func refused(status int, text []byte) error {
	e := new(Error)
	if json.Unmarshal(text, e) != nil || e.Code == "" {
		return fmt.Errorf("the holder answered %d: %.200q", status, text)
	}
	return e
}

// dial connects and looks who is at the other end.
func (c Client) dial(ctx context.Context) (*net.UnixConn, error) {
	if err := localsock.CheckPath(c.Socket); err != nil {
		return nil, err
	}
	users := []int{os.Geteuid(), 0, c.HolderUID}
	if c.named {
		err := localsock.CheckFolder(filepath.Dir(c.Socket), users...)
		if errors.Is(err, fs.ErrNotExist) {
			err = fmt.Errorf("%w: %w", ErrNone, err)
		}
		if err != nil {
			return nil, err
		}
	}
	conn, err := new(net.Dialer).DialContext(ctx, "unix", c.Socket)
	switch {
	case errors.Is(err, syscall.ENOENT), errors.Is(err, syscall.ECONNREFUSED):
		return nil, fmt.Errorf("%w: %w", ErrNone, err)
	case errors.Is(err, syscall.EAGAIN):
		return nil, fmt.Errorf("%s: %w", c.Socket, Refuse(CodeBusy, "too many wait to be let in"))
	case err != nil:
		return nil, err
	}
	u := conn.(*net.UnixConn)
	uid, err := localsock.Peer(u)
	if err == nil && !slices.Contains(users, uid) {
		err = fmt.Errorf("%s: %w: %d", c.Socket, ErrOtherUser, uid)
	}
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return u, nil
}
