package api

import (
	"net/url"

	"github.com/kiln-registry/kiln-registry/identity"
)

// Paths of the routes that take no argument.
const (
	PathPing          = "/v2/"
	PathBases         = "/v1/bases"
	PathUnbound       = "/v1/artifacts" // with unbound=true
	PathCompare       = "/v1/compare"
	PathCompatibility = "/v1/compatibility"
	PathOpenAPI       = "/v1/openapi.yaml"
	PathHealth        = "/health"
	PathHealthV1      = "/v1/health"
	PathReady         = "/readyz"
	PathMetrics       = "/metrics"
)

// PathBlob is a blob of a repository: HEAD, GET, DELETE.
func PathBlob(repo string, d identity.Digest) string { return "/v2/" + repo + "/blobs/" + d.String() }

// PathMidstates is the midstates of a blob, whichever repository holds it: HEAD, GET.
func PathMidstates(d identity.Digest) string { return "/v1/blobs/" + d.String() + "/midstates" }

// PathUploads is where an upload begins: POST.
func PathUploads(repo string) string { return "/v2/" + repo + "/blobs/uploads/" }

// PathUpload is one upload: GET, PATCH, PUT, DELETE. It stays the same for the life of the upload.
func PathUpload(repo, id string) string { return PathUploads(repo) + url.PathEscape(id) }

// PathManifest is a manifest by tag or by the text form of its digest: HEAD, GET, PUT, DELETE.
func PathManifest(repo, ref string) string { return "/v2/" + repo + "/manifests/" + ref }

// PathTags lists the tags of a repository: GET.
func PathTags(repo string) string { return "/v2/" + repo + "/tags/list" }

// PathReferrers lists the manifests of a repository whose subject is d: GET.
func PathReferrers(repo string, d identity.Digest) string {
	return "/v2/" + repo + "/referrers/" + d.String()
}

// PathBase is what is held of one base model: GET.
func PathBase(a identity.Aggregate) string { return PathBases + "/" + a.String() }

// PathBaseManifest is a full shard manifest of a base: GET.
func PathBaseManifest(a identity.Aggregate) string { return PathBase(a) + "/manifest" }

// PathEvals is a line for each run of the evals of a base: GET.
func PathEvals(a identity.Aggregate) string { return PathBase(a) + "/evals.jsonl" }

// PathLineage is what an artifact was made from, and what was made from it: GET.
func PathLineage(d identity.Digest) string { return PathUnbound + "/" + d.String() + "/lineage" }

// PathArtifacts lists what was made from a base: GET.
func PathArtifacts(a identity.Aggregate) string { return PathBase(a) + "/artifacts" }
