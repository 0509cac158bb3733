// Package safetensors reads and checks the header of safetensors files, and selects which files of a model folder make
// up its base weights. It is pure: it opens nothing, and works on bytes and listings that the caller has.
package safetensors

import (
	"errors"
	"fmt"
	"strings"

	"github.com/kiln-registry/kiln-registry/identity"
)

// Codes of Error: faults of one file.
const (
	CodeHeaderTooShort   = "header_too_short"        // fewer than 8 bytes
	CodeHeaderTooLarge   = "header_too_large"        // header over MaxHeader
	CodeHeaderExceeds    = "header_len_exceeds_file" // header ends after the end of the file
	CodeHeaderNotJSON    = "header_not_json"
	CodeLFSPointer       = "lfs_pointer"     // a git-lfs pointer in place of the file
	CodeHTMLPage         = "html_page"       // an HTML or XML page in place of the file
	CodeNotSafetensors   = "not_safetensors" // another known format
	CodeDuplicateTensor  = "duplicate_tensor"
	CodeBadTensor        = "bad_tensor" // a description that lacks a member or has one of another type
	CodeBadInteger       = "bad_integer"
	CodeUnknownDType     = "unknown_dtype" // the only fault: the bytes can be identified, but not loaded
	CodeMetadata         = "metadata_not_string"
	CodeOffsetOrder      = "offset_order"
	CodeOffsetGap        = "offset_gap"
	CodeOffsetOverlap    = "offset_overlap"
	CodeSizeMismatch     = "size_mismatch"
	CodeTruncated        = "truncated"
	CodeTrailingBytes    = "trailing_bytes"
	CodeEmptyShard       = "empty_shard"
	CodeSymlink          = "symlink_shard"
	CodeNotRegular       = "not_a_regular_file"
	CodeNotPortableName  = "not_portable_name"
	CodeNoShards         = "no_shards"
	CodeTooManyShards    = "too_many_shards"
	CodeAdapterNotBase   = "adapter_not_base"
	CodeIndexNotJSON     = "index_not_json"
	CodeIndexTooLarge    = "index_too_large"
	CodeIndexEmpty       = "index_empty"          // no weight_map, or one without entries
	CodeIndexWeightMap   = "index_bad_weight_map" // no object, or a value that is no string
	CodeIndexMissingFile = "index_missing_shard"
)

// Error says why a file or a folder is refused.
type Error struct {
	Code  string
	File  string   // name of the file at fault, empty when not known or not one file
	Names []string // every name at fault where there can be several, sorted
	Msg   string   // on one line; foreign text in it is escaped
}

// Error gives one line: file, fault and code.
func (e *Error) Error() string {
	msg := e.Msg + " (" + e.Code + ")"
	if e.File != "" {
		msg = quote(e.File) + ": " + msg
	}
	return msg
}

func refuse(code, format string, args ...any) *Error {
	return &Error{Code: code, Msg: fmt.Sprintf(format, args...)}
}

func refuseFile(code, file, format string, args ...any) *Error {
	return &Error{Code: code, File: file, Msg: fmt.Sprintf(format, args...)}
}

// InFile says in which file err was found. It keeps err's type and code.
func InFile(name string, err error) error {
	if e, ok := errors.AsType[*Error](err); ok && e.File == "" {
		named := *e
		named.File = name
		return &named
	}
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", quote(name), err)
}

// quote leaves a plain name as it is and escapes any other.
func quote(name string) string {
	if name == "" || len(name) > identity.MaxFilename || strings.ContainsFunc(name, isOdd) {
		return fmt.Sprintf("%+.300q", name)
	}
	return name
}

// isOdd says whether a name with c is quoted in messages.
func isOdd(c rune) bool {
	return c <= ' ' || c > '~' || c == '"' || c == '\\' || c == ',' || c == ':'
}

// quoteAll joins names for a message.
func quoteAll(names []string) string {
	quoted := make([]string, len(names))
	for i, n := range names {
		quoted[i] = quote(n)
	}
	return strings.Join(quoted, ", ")
}
