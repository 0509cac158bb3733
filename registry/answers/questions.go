package answers

import (
	"errors"
	"maps"
	"slices"
	"strings"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/strictjson"
)

// ParseCompare reads the body of a comparison: strict JSON of exactly the members of api.CompareRequest.
// ErrParameterInvalid.
func ParseCompare(body []byte) (req api.CompareRequest, err error) {
	err = question(body, func(r *strictjson.Reader) error {
		return r.Struct(
			strictjson.Field{Name: "a", Read: func() error { return readSide(r, &req.A) }},
			strictjson.Field{Name: "b", Read: func() error { return readSide(r, &req.B) }})
	})
	return req, err
}

// ParseCompatibility reads the body of a question about compatibility in the same way. What is in its request is read
// when the question is answered.
func ParseCompatibility(body []byte) (req api.CompatibilityRequest, err error) {
	err = question(body, func(r *strictjson.Reader) error {
		side := func(to **api.Side) func() error {
			return func() error {
				*to = new(api.Side)
				return readSide(r, *to)
			}
		}
		return r.Struct(
			optionalText(r, "question", &req.Question), optionalText(r, "artifact", &req.Artifact),
			optional("base", side(&req.Base)), optional("other", side(&req.Other)),
			optional("run", func() error {
				n, err := r.Uint32()
				run := int(n)
				req.Run = &run
				return err
			}),
			optional("identities", func() (err error) { req.Identities, err = readDigests(r); return err }),
			optionalText(r, "work", &req.Work), optionalText(r, "lineage", &req.Lineage),
			optional("request", func() (err error) { req.Request, err = r.Raw(); return err }))
	})
	if err == nil {
		err = belong(req)
	}
	return req, err
}

// members are those of a question beside its base.
var members = map[string][]string{
	api.QuestionSameBase: {"other"},
	api.QuestionAdapter:  {"artifact", "identities", "work", "lineage"},
	api.QuestionEval:     {"artifact", "identities", "work", "lineage", "run"},
	api.QuestionResume:   {"artifact", "identities." + api.IdentityProvenance, "request"},
}

// belong refuses a question with a member that it has no use for: its answer would not be about that.
func belong(req api.CompatibilityRequest) error {
	own, known := members[req.Question]
	if !known {
		return nil // which is said when it is to be answered
	}
	given := map[string]bool{
		"artifact": req.Artifact != "", "other": req.Other != nil, "run": req.Run != nil, "work": req.Work != "",
		"lineage": req.Lineage != "", "request": len(req.Request) > 0,
	}
	for name := range req.Identities {
		given["identities."+name] = true
	}
	for _, name := range slices.Sorted(maps.Keys(given)) {
		group, _, _ := strings.Cut(name, ".")
		if given[name] && !slices.Contains(own, name) && !slices.Contains(own, group) {
			return api.Errorf(api.CodeParameterInvalid, "%.80s is no member of the question %s", name, req.Question)
		}
	}
	return nil
}

func question(body []byte, read func(*strictjson.Reader) error) error {
	if err := strictjson.Read(body, read); err != nil {
		return api.Errorf(api.CodeParameterInvalid, "body: %v", err)
	}
	return nil
}

func optional(name string, read func() error) strictjson.Field {
	return strictjson.Field{Name: name, Optional: true, Read: read}
}

func optionalText(r *strictjson.Reader, name string, to *string) strictjson.Field {
	return optional(name, func() (err error) { *to, err = r.String(); return err })
}

func readSide(r *strictjson.Reader, s *api.Side) error {
	return r.Struct(
		optional("aggregate_sha256", func() error { return parsed(r, &s.Aggregate, parseBase) }),
		optional("base_weight_shard_manifest", func() error {
			at := r.Offset()
			text, err := r.Raw()
			if err != nil {
				return err
			}
			m, err := identity.Parse(text)
			if err != nil {
				return r.Fail(at, strictjson.RuleType, "%v", err)
			}
			s.Manifest = &m
			return nil
		}),
		optionalText(r, "reference", &s.Reference))
}

// parseBase reads the aggregate of a base.
func parseBase(text string) (identity.Aggregate, error) {
	a, err := identity.ParseAggregate(text)
	if err == nil && a.IsZero() {
		err = errors.New("zeros name no base")
	}
	return a, err
}

func readDigests(r *strictjson.Reader) (map[string]identity.Digest, error) {
	all := map[string]identity.Digest{}
	return all, r.Object(func(name string) error {
		var d identity.Digest
		err := parsed(r, &d, identity.ParseDigest)
		all[name] = d
		return err
	})
}

// parsed reads a text of a form of its own.
func parsed[T any](r *strictjson.Reader, to *T, parse func(string) (T, error)) error {
	at := r.Offset()
	text, err := r.String()
	if err != nil {
		return err
	}
	if *to, err = parse(text); err != nil {
		return r.Fail(at, strictjson.RuleType, "%v", err)
	}
	return nil
}
