package admin

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/cmd/kiln-registry/internal/home"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/cli"
	"github.com/kiln-registry/kiln-registry/internal/cli/progress"
	"github.com/kiln-registry/kiln-registry/registry/classify"
	"github.com/kiln-registry/kiln-registry/transfer"
)

func copyCommand(stderr io.Writer) *cobra.Command {
	var init bool
	cmd := &cobra.Command{
		Use: "copy-store SRC DST", Short: "Copy a store into another, and check every byte on the way",
		Long: `Copy a store into another, and check every byte on the way. SRC and DST are each ` + home.PlaceForms + `.

No server may run on either. DST must be a copy of SRC that an earlier run began, or a store in which nothing is yet;
--init makes one. An interrupted copy goes on when the same command is run again, and a copy of an older state of SRC
gets what is new. Blobs that are damaged in SRC are named, and so are those that a manifest refers to and that are gone
or in quarantine; all others are copied.`,
		Args: cli.Args("SRC", "DST"),
		RunE: func(cmd *cobra.Command, args []string) error {
			src, err := home.ParsePlace("SRC", args[0])
			if err != nil {
				return err
			}
			dst, err := home.ParsePlace("DST", args[1])
			if err != nil {
				return err
			}
			return copyStore(cmd.Context(), src, dst, init, cmd.OutOrStdout(), stderr)
		},
	}
	cmd.Flags().BoolVar(&init, "init", false, "make DST a store first, if it is new or empty")
	return cmd
}

func copyStore(ctx context.Context, src, dst home.Place, init bool, stdout, stderr io.Writer) error {
	if src.Same(dst) {
		return cli.Usagef("SRC and DST are the same store: %s", src)
	}
	notify := func(line string) { cli.Warn(stderr, "%s", line) }
	from, err := src.Open(ctx, notify, home.Way{})
	if errors.Is(err, blobstore.ErrNotStore) {
		return cli.Hint(err, "SRC must be a store: check its path, or its bucket and prefix")
	} else if err != nil {
		return err
	}
	to, err := openCopy(ctx, dst, init, notify)
	if err != nil {
		return errors.Join(err, from.Close())
	}
	did, err := copyShown(ctx, to, from, stdout, stderr)
	if err = errors.Join(notCopied(dst, err), from.Close(), to.Close()); err != nil {
		return err
	}
	fmt.Fprintf(stdout, "%s holds all of %s: copied %s, %s and %s; %s there already\n", dst, src,
		cli.Count(did.Blobs, "blob"), cli.Bytes(did.Bytes), cli.Count(did.Refs, "ref"), cli.Count(did.Present, "blob"))
	return nil
}

func openCopy(ctx context.Context, dst home.Place, init bool, notify func(string)) (home.Engine, error) {
	if init {
		if err := dst.Make(ctx); err != nil {
			return nil, err
		}
	}
	return dst.Open(ctx, notify, home.Way{})
}

// copyShown copies, shows how far it is, and fails if blobs are damaged.
func copyShown(ctx context.Context, to, from home.Engine, stdout, stderr io.Writer) (blobstore.CopyResult, error) {
	const phase = "copy"
	show := progress.New(cli.Flags{}, stdout, stderr)
	defer show.Abandon()
	did, err := blobstore.Copy(ctx, to, from, blobstore.CopyOptions{
		Planned: func(_ int, bytes int64) {
			show.Watch(transfer.Event{Step: transfer.Planned, Phase: phase, Total: bytes})
		},
		Moved: func(i blobstore.Info, at int64) {
			show.Watch(transfer.Event{Step: transfer.Moved, Phase: phase, File: i.Digest.String(), Bytes: at, Total: i.Size})
		},
		Copied: func(i blobstore.Info) {
			show.Watch(transfer.Event{Step: transfer.Done, Phase: phase, File: i.Digest.String(), Bytes: i.Size, Total: i.Size})
		},
		Damaged: func(i blobstore.Info, err error) {
			show.Note(fmt.Sprintf("damaged: blob %s (%s): %s", i.Digest, cli.Bytes(i.Size), damage(err)))
		},
		Refers: func(r blobstore.Ref) ([]identity.Digest, error) {
			m, err := classify.ParseTaken(r.MediaType, r.Manifest)
			return m.Refers(), err
		},
		Missing: func(m blobstore.Missing) {
			show.Note(fmt.Sprintf("missing: blob %s, which %s@%s refers to: %s", m.Digest, m.Repo, m.Manifest, absence(m.Err)))
		},
	})
	if err == nil && did.Damaged+did.Missing > 0 {
		err = cli.Hint(
			cli.Exit(cli.CodeNo, fmt.Errorf("%s; copied were %s and %s",
				notWhole(did), cli.Count(did.Blobs, "blob"), cli.Count(did.Refs, "ref"))),
			"push those bytes again to a registry on DST, or put them back into SRC and run this again",
		)
	}
	return did, err
}

// notWhole says what of SRC was not copied.
func notWhole(did blobstore.CopyResult) string {
	var parts []string
	if did.Damaged > 0 {
		parts = append(parts, cli.Count(did.Damaged, "blob")+" of SRC damaged and not copied")
	}
	if did.Missing > 0 {
		parts = append(parts, cli.Count(did.Missing, "blob")+" missing in SRC though manifests refer to it")
	}
	return strings.Join(parts, ", ")
}

// absence says why SRC did not give a blob.
func absence(err error) string {
	switch {
	case errors.Is(err, blobstore.ErrQuarantined):
		return "its bytes are damaged and in quarantine"
	case errors.Is(err, blobstore.ErrNotFound):
		return "SRC does not have it"
	}
	return err.Error()
}

// damage says what is wrong with a blob that was not copied.
func damage(err error) string {
	var path *fs.PathError
	switch {
	case errors.Is(err, blobstore.ErrDigestMismatch):
		return "its bytes are not those of its digest"
	case errors.Is(err, blobstore.ErrSizeMismatch):
		return "it is not as long as it was when it was stored"
	case errors.Is(err, blobstore.ErrNotFound):
		return "the store has no bytes for it"
	case errors.As(err, &path):
		return fmt.Sprintf("%s can't be read: %v", path.Path, path.Err)
	}
	return "it can't be read: " + err.Error()
}

// notCopied says what can be done about an error of a copy.
func notCopied(dst home.Place, err error) error {
	switch {
	case err == nil, errors.Is(err, context.Canceled):
		return err
	case errors.Is(err, blobstore.ErrDiffers):
		return cli.Hint(cli.Exit(cli.CodeUsage, err), "DST must be a copy that was begun from SRC, or a new store: --init")
	case errors.Is(err, blobstore.ErrNoSpace), errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return cli.Hint(cli.Exit(cli.CodeDisk, err),
			"make room at "+dst.String()+"; the same command goes on from where this one stopped")
	case errors.Is(err, blobstore.ErrUnavailable), errors.Is(err, blobstore.ErrInUse):
		return dst.Explain(err)
	}
	return err
}
