package bucket

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
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
)

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
func (b *Bucket) explain(a action, key string, err error) error {
	if err == nil || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	if errors.Is(err, errNoCredentials) {
		return fmt.Errorf("%s: %w", b, err)
	}
	var e minio.ErrorResponse
	if !errors.As(err, &e) {
		return fmt.Errorf("%w: %s at %s: %w", blobstore.ErrUnavailable, b, b.Endpoint, err)
	}
	switch e.Code {
	case "NoSuchKey":
		return fmt.Errorf("%s: %w", key, ErrAbsent)
	case "NoSuchUpload":
		return fmt.Errorf("%s: %w", key, ErrNoUpload)
	case "PreconditionFailed", "ConditionalRequestConflict", "OperationAborted":
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
	case e.StatusCode == http.StatusNotFound:
		return fmt.Errorf("%s: %w", key, ErrAbsent)
	case e.StatusCode == http.StatusPreconditionFailed || e.StatusCode == http.StatusConflict:
		return fmt.Errorf("%s: %w", key, ErrConflict)
	case e.StatusCode >= 500 || e.StatusCode == http.StatusTooManyRequests:
		return fmt.Errorf("%w: %s at %s: %d %s: %s",
			blobstore.ErrUnavailable, a, b.Endpoint, e.StatusCode, e.Code, e.Message)
	}
	return fmt.Errorf("%s on %s/%s: %d %s: %w", a, b, key, e.StatusCode, e.Code, err)
}

// refused explains what only the one who runs the registry can put right.
func (b *Bucket) refused(a action, key string, e minio.ErrorResponse) error {
	switch e.Code {
	case "NoSuchBucket":
		return fmt.Errorf("there is no bucket %q at %s: make it first, or check the name and the endpoint",
			b.Bucket, b.Endpoint)
	case "AccessDenied", "AllAccessDisabled":
		return fmt.Errorf("these credentials may not %s on %s/%s: a policy must allow it (%s)", a, b, key, e.Message)
	case "InvalidAccessKeyId", "InvalidToken", "ExpiredToken", "InvalidClientTokenId":
		return fmt.Errorf("%s does not know these credentials (%s: %s): check AWS_ACCESS_KEY_ID and its kin",
			b.Endpoint, e.Code, e.Message)
	case "SignatureDoesNotMatch":
		return fmt.Errorf("%s refuses the signature: AWS_SECRET_ACCESS_KEY is not that of AWS_ACCESS_KEY_ID, "+
			"or a proxy changes requests", b.Endpoint)
	case "RequestTimeTooSkewed":
		now := time.Now()
		return fmt.Errorf("the clock of this machine is off: it says %s, %s says %s: set it right",
			now.UTC().Format(time.DateTime), b.Endpoint, now.Add(time.Duration(b.skew.Load())).UTC().Format(time.DateTime))
	case "PermanentRedirect", "AuthorizationHeaderMalformed", "InvalidRegion", "IllegalLocationConstraintException":
		return fmt.Errorf("bucket %q at %s is not in region %q: put region=%s into the URL of the store (%s)",
			b.Bucket, b.Endpoint, b.region(), cmp.Or(e.Region, "…"), e.Message)
	}
	return nil
}
