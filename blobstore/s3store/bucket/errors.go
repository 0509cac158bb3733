package bucket

import (
	"cmp"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/minio/minio-go/v7"

	"github.com/kiln-registry/kiln-registry/blobstore"
)

// What a server answers and callers act upon. Other errors are for people, or blobstore.ErrUnavailable or ErrNoSpace.
var (
	ErrAbsent   = errors.New("no such object")
	ErrNoUpload = errors.New("no such multipart upload")
	ErrConflict = errors.New("the object was changed meanwhile")
	ErrParts    = errors.New("the server no longer has the parts as they were sent")
	// ErrChanged: what the server stored, or would have, is not what was sent, also after trying again.
	ErrChanged = fmt.Errorf("%w: bytes were changed on their way to the server", blobstore.ErrUnavailable)

	// Transient, as ErrChanged is, and not known as that to the client.
	errBroken = errors.New("no whole answer came")
	errBusy   = fmt.Errorf("%w: the server refuses the request for another one", blobstore.ErrUnavailable)
)

// persist makes a request again while it fails for a reason that may pass and that the client does not know as one.
func (b *Bucket) persist(ctx context.Context, request func() error) error {
	for tries := 1; ; tries++ {
		err := request()
		passing := errors.Is(err, errBroken) || errors.Is(err, errBusy) || errors.Is(err, ErrChanged)
		if !passing || tries >= Attempts {
			return err
		}
		if err := b.Pause(ctx, tries); err != nil {
			return err
		}
	}
}

// action is what a request does, in the words of a bucket's policy.
type action string

const (
	getObject   action = "s3:GetObject"
	putObject   action = "s3:PutObject"
	delObject   action = "s3:DeleteObject"
	listBucket  action = "s3:ListBucket"
	abortUpload action = "s3:AbortMultipartUpload"
	listUploads action = "s3:ListBucketMultipartUploads"
)

// explain makes the error of a request to key one that says what to do, or one to act upon.
func (b *Bucket) explain(ctx context.Context, a action, key string, err error) error {
	// A deadline of the network's is an error of the same name.
	ended := errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) && ctx.Err() != nil
	if err == nil || ended {
		return err
	}
	if errors.Is(err, errNoCredentials) {
		return fmt.Errorf("%s: %w", b, err)
	}
	var e minio.ErrorResponse
	if !errors.As(err, &e) {
		return b.unanswered(err)
	}
	switch e.Code {
	case "NoSuchKey":
		return fmt.Errorf("%s: %w", key, ErrAbsent)
	case "NoSuchUpload":
		return fmt.Errorf("%s: %w", key, ErrNoUpload)
	case "PreconditionFailed":
		return fmt.Errorf("%s: %w", key, ErrConflict)
	case "InvalidPart", "InvalidPartOrder", "EntityTooSmall":
		return fmt.Errorf("%s: %w: %s", key, ErrParts, e.Message)
	case "BadDigest", "InvalidDigest", "XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch":
		return fmt.Errorf("%s: %w: %s", key, ErrChanged, e.Message)
	case "NotImplemented":
		return fmt.Errorf("%s: %w: %s", key, errors.ErrUnsupported, e.Message)
	case "InsufficientStorage", "QuotaExceeded", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded":
		return fmt.Errorf("%w: %s: %s", blobstore.ErrNoSpace, b, e.Message)
	}
	if refused := b.refused(a, key, e); refused != nil {
		return refused
	}
	switch {
	case e.StatusCode == http.StatusPreconditionFailed:
		return fmt.Errorf("%s: %w", key, ErrConflict)
	case e.StatusCode == http.StatusConflict: // two requests at a time, in most cases
		return fmt.Errorf("%s: %w: %s: %s", key, errBusy, e.Code, e.Message)
	case e.StatusCode >= 500 || e.StatusCode == http.StatusTooManyRequests || e.Code == "RequestTimeout",
		e.StatusCode == http.StatusOK: // an error may come inside an answer that began well
		return fmt.Errorf("%w: %s at %s: %d %s: %s",
			blobstore.ErrUnavailable, a, b.Endpoint, e.StatusCode, e.Code, e.Message)
	}
	return fmt.Errorf("%s on s3://%s/%s: %d %s: %w", a, b.Bucket, key, e.StatusCode, e.Code, err)
}

// unanswered explains why there was no answer, or none that can be read.
func (b *Bucket) unanswered(err error) error {
	var (
		sent    *url.Error
		unknown x509.UnknownAuthorityError
	)
	switch {
	case errors.As(err, &unknown):
		return fmt.Errorf("%s has a certificate of an authority that this machine does not trust: "+
			"put ca-file=PATH of the authority's certificate into the URL of the store (%w)", b.Endpoint, err)
	case errors.Is(err, http.ErrSchemeMismatch):
		return fmt.Errorf("%s speaks plain HTTP: put endpoint=http://%s into the URL of the store (%w)",
			b.Endpoint, b.Endpoint, err)
	case !errors.As(err, &sent), strings.Contains(sent.URL, "?location"): // which the client asks for once only
		err = fmt.Errorf("%w: %w", errBroken, err)
	}
	return fmt.Errorf("%w: %s at %s: %w", blobstore.ErrUnavailable, b, b.Endpoint, err)
}

// refused explains what only the one who runs the registry can put right.
func (b *Bucket) refused(a action, key string, e minio.ErrorResponse) error {
	switch e.Code {
	case "NoSuchBucket":
		return fmt.Errorf("there is no bucket %q at %s: make it first, or check the name and the endpoint",
			b.Bucket, b.Endpoint)
	case "AccessDenied", "AllAccessDisabled":
		also := ""
		if a == getObject {
			also = ", and s3:ListBucket for objects that are not there"
		}
		return fmt.Errorf("these credentials may not %s on s3://%s/%s: a policy must allow it%s (%s)",
			a, b.Bucket, key, also, e.Message)
	case "InvalidAccessKeyId", "InvalidToken", "ExpiredToken", "InvalidClientTokenId", "XAdminUserNotFound":
		return fmt.Errorf("%s does not know these credentials (%s: %s): check AWS_ACCESS_KEY_ID and its kin",
			b.Endpoint, e.Code, e.Message)
	case "SignatureDoesNotMatch":
		return fmt.Errorf("%s refuses the signature: AWS_SECRET_ACCESS_KEY is not that of AWS_ACCESS_KEY_ID, "+
			"or a proxy changes requests", b.Endpoint)
	case "RequestTimeTooSkewed":
		skew := time.Duration(b.skew.Load()).Round(time.Second)
		now := time.Now().UTC()
		return fmt.Errorf("the clock of this machine says %s and that of %s says %s, %s apart: set the wrong one right",
			now.Format(time.DateTime), b.Endpoint, now.Add(skew).Format(time.DateTime), skew.Abs())
	case "PermanentRedirect", "AuthorizationHeaderMalformed", "InvalidRegion", "IllegalLocationConstraintException":
		return fmt.Errorf("bucket %q at %s is not in region %q: put region=%s into the URL of the store (%s)",
			b.Bucket, b.Endpoint, b.region(), cmp.Or(e.Region, "…"), e.Message)
	}
	if e.StatusCode == http.StatusBadRequest && strings.Contains(e.Message, "HTTP request to an HTTPS server") {
		return fmt.Errorf("%s speaks HTTPS: put endpoint=https://%s into the URL of the store", b.Endpoint, b.Endpoint)
	}
	return nil
}
