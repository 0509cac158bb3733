package api

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
)

func TestErrorMatchesByCode(t *testing.T) {
	err := fmt.Errorf("pull: %w", Errorf(CodeBlobUnknown, "blob x").With(Missing{Digest: "x"}))
	if !errors.Is(err, ErrBlobUnknown) || errors.Is(err, ErrManifestUnknown) {
		t.Fatal("errors.Is does not go by code")
	}
	b, _ := json.Marshal(Errors{[]*Error{AsError(err)}})
	var back Errors
	if err := json.Unmarshal(b, &back); err != nil || !errors.Is(back.Errors[0], ErrBlobUnknown) {
		t.Fatalf("%s: %v", b, err)
	}
	if e := AsError(errors.New("secret path")); e.Code != CodeInternal || strings.Contains(e.Error(), "secret") {
		t.Fatalf("%+v", e)
	}
	if s := (&Error{Code: "NEVER_SEEN"}).Status(); s != http.StatusInternalServerError {
		t.Fatal(s)
	}
}

func TestCodesHaveStatusAndMessage(t *testing.T) {
	for c, row := range codes {
		if row.status < 400 || row.message == "" || Errorf(c, "").Message != row.message {
			t.Errorf("%s: %+v", c, row)
		}
	}
}

func TestNames(t *testing.T) {
	good := []string{"a", "a/b", "a0/b-c/d__e.f", "team/model", "a---b"}
	bad := []string{
		"",
		"A",
		"a/",
		"/a",
		"a//b",
		"a..b",
		"a___b",
		"-a",
		"a_",
		"a b",
		"a/../b",
		"ä",
		strings.Repeat("a", 256),
	}
	for _, s := range good {
		if err := CheckRepo(s); err != nil {
			t.Errorf("%q: %v", s, err)
		}
	}
	for _, s := range bad {
		if err := CheckRepo(s); !errors.Is(err, ErrNameInvalid) {
			t.Errorf("%q: %v", s, err)
		}
	}
	for s, ok := range map[string]bool{"v1": true, "_x": true, "A.b-C": true, strings.Repeat("t", 128): true,
		"": false, ".x": false, "-x": false, "a/b": false, "a b": false, strings.Repeat("t", 129): false} {
		if err := CheckTag(s); (err == nil) != ok || err != nil && !errors.Is(err, ErrTagInvalid) {
			t.Errorf("%q: %v", s, err)
		}
	}
}

func TestRefs(t *testing.T) {
	hex := strings.Repeat("ab", 32)
	for s, want := range map[string]error{
		"v1": nil, "sha256:" + hex: nil,
		"sha256:" + strings.ToUpper(hex): ErrDigestInvalid, "sha256:..": ErrDigestInvalid,
		"sha512:" + hex + hex:                   ErrDigestInvalid,
		":":                                     ErrDigestInvalid,
		"sha256:" + strings.Repeat("a", 10<<20): ErrDigestInvalid, ".": ErrTagInvalid,
	} {
		r, err := ParseRef(s)
		if !errors.Is(err, want) || want == nil && (err != nil || r.String() != s) {
			t.Errorf("%.90q: %v, %v", s, r, err)
		}
		if err != nil && len(err.Error()) > 300 {
			t.Errorf("message of %d bytes", len(err.Error()))
		}
	}
	repo, r, err := ParseReference("a/b:v1")
	if repo != "a/b" || r.Tag != "v1" || err != nil {
		t.Error(repo, r, err)
	}
	repo, r, err = ParseReference("a/b@sha256:" + hex)
	if repo != "a/b" || r.Digest.Hex() != hex || err != nil {
		t.Error(repo, r, err)
	}
	for _, s := range []string{"a/b", "a/b:", "A:v1", "a@v1", "a:v1@sha256:" + hex} {
		if _, _, err := ParseReference(s); err == nil {
			t.Errorf("%q was taken", s)
		}
	}
}
