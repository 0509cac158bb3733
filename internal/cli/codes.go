package cli

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io/fs"
	"net"
	"net/http"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/documents"
	"github.com/kiln-registry/kiln-registry/identity/safetensors"
)

// ExitCodes says for a help text what the codes mean.
const ExitCodes = "Exit codes: 0 done, or yes; 1 no; 2 wrong usage, or could not tell; 3 not logged in, not allowed, or\n" +
	"the registry is read-only; 4 not found; 5 refused data; 6 registry unreachable or failing; 7 local disk; 8 device;\n" +
	"75 try again."

// WithExitCodes ends the help of all commands below root with what the codes mean.
func WithExitCodes(root *cobra.Command) {
	for _, cmd := range root.Commands() {
		if cmd.Long == "" {
			cmd.Long = cmd.Short + "."
		}
		cmd.Long += "\n\n" + ExitCodes
	}
}

// Code returns the exit code of an error: the one that Exit gave it, else the one that its kind stands for.
func Code(err error) int {
	var x *exit
	switch {
	case err == nil:
		return CodeOK
	case errors.As(err, &x):
		return x.code
	}
	return kind(err)
}

// kind returns the code that an error stands for by itself.
func kind(err error) int {
	switch {
	case isRule(err):
		return CodeBadInput
	case errors.Is(err, client.ErrMismatch):
		return CodeNo
	case errors.Is(err, client.ErrNotBlob), errors.Is(err, client.ErrRangeIgnored), errors.Is(err, client.ErrIdle),
		errors.Is(err, client.ErrSlow):
		return CodeUnreachable
	}
	if code := answerCode(err); code != 0 {
		return code
	}
	return systemCode(err)
}

// isRule says that data breaks a rule of selection or format.
func isRule(err error) bool {
	var selection *safetensors.Error
	var manifest *identity.Error
	var document *documents.Error
	return errors.As(err, &selection) || errors.As(err, &manifest) || errors.As(err, &document)
}

// statusOf returns the HTTP status of what a registry answered; 0: it is no answer.
func statusOf(err error) int {
	var s *client.StatusError
	var a *api.Error
	if errors.As(err, &s) {
		return s.Status
	} else if errors.As(err, &a) {
		return a.Status()
	}
	return 0
}

// answerCode is for what a registry answered.
func answerCode(err error) int {
	status := statusOf(err)
	switch {
	case status == 0:
		return 0
	case status == http.StatusUnauthorized, status == http.StatusForbidden, status == http.StatusMethodNotAllowed:
		return CodeDenied
	case status == http.StatusNotFound:
		return CodeNotFound
	case status == http.StatusTooManyRequests, status >= 500, status < 400: // a page with 200 is no registry either
		return CodeUnreachable
	}
	return CodeBadInput
}

// systemCode is for what this machine says.
func systemCode(err error) int {
	var op *net.OpError
	var n net.Error
	var number syscall.Errno // which is a net.Error, too: of something on this machine, unless it is in a net.OpError
	switch {
	case errors.Is(err, context.Canceled), errors.Is(err, syscall.EINTR):
		return CodeTryAgain
	case errors.As(err, &op), isTLS(err), errors.Is(err, http.ErrSchemeMismatch):
		return CodeUnreachable
	case full(err), errors.Is(err, fs.ErrPermission), errors.Is(err, syscall.EROFS), errors.Is(err, syscall.EIO):
		return CodeDisk
	case errors.Is(err, fs.ErrNotExist):
		return CodeNotFound
	case isPath(err):
		return CodeUsage
	case errors.As(err, &n) && !errors.As(err, &number), client.Temporary(err):
		return CodeUnreachable
	}
	return CodeUsage
}

func isPath(err error) bool {
	var path *fs.PathError
	return errors.As(err, &path)
}

func full(err error) bool { return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) }

func isTLS(err error) bool {
	var record tls.RecordHeaderError
	var verify *tls.CertificateVerificationError
	var unknown x509.UnknownAuthorityError
	return errors.As(err, &record) || errors.As(err, &verify) || errors.As(err, &unknown)
}

// hintOf returns what can be done about an error: the hint that it carries, else the usual one of its kind.
func hintOf(err error) string {
	code := kind(err)
	var h *hint
	var record tls.RecordHeaderError
	var refused *api.Error
	var hinted interface{ Hint() string }
	switch {
	case errors.As(err, &h):
		return h.text
	case errors.As(err, &hinted) && !errors.As(err, new(*documents.Error)): // which says it in its text
		return hinted.Hint()
	case errors.As(err, &record), errors.Is(err, http.ErrSchemeMismatch):
		return "if that registry speaks plain HTTP, add --plain-http"
	case isTLS(err):
		return "--ca-file names the certificates to trust"
	case full(err):
		return "free some space; the same command goes on from where this one stopped"
	case errors.Is(err, api.ErrStoreFull):
		return "the registry's own disk is full; what it has acknowledged is kept"
	case errors.As(err, &refused) && refused.Reason() == api.CodeTagImmutable:
		return "that registry keeps such tags as they are; use another tag"
	case errors.As(err, &refused) && refused.Reason() == api.CodeReadOnly:
		return "that registry is read-only, whoever asks: push to another one, or ask whoever runs it"
	case code == CodeDenied && statusOf(err) == http.StatusMethodNotAllowed:
		return "that registry does not take this; it may be read-only"
	case code == CodeDenied:
		return "set KILN_TOKEN, give --token-file FILE, or run docker login; the token needs the right for this repository"
	case code == CodeUnreachable:
		return "check the address, and that the registry runs (kiln-registry serve)"
	case code == CodeNotFound && errors.Is(err, api.ErrManifestUnknown):
		return "check the repository and the tag; kiln-pull find AGGREGATE lists where a base is held"
	}
	return ""
}
