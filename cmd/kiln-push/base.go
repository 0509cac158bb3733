package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/internal/cli"
	"github.com/kiln-registry/kiln-registry/internal/cli/progress"
	"github.com/kiln-registry/kiln-registry/transfer"
)

func baseCommand() *cobra.Command {
	var flags cli.Flags
	var r reading
	var incomplete bool
	about := map[string]*string{}
	cmd := &cobra.Command{
		Use:   "base DIR REF",
		Short: "Push a base model",
		Long: "Push a base model: its shards, and the JSON, tokenizer, template, code and document files beside them.\n" +
			"Only what the registry lacks is sent, and the same command goes on after a kill. The same bytes and names\n" +
			"give the same digest.",
		Args: cli.Args("DIR", "REF"),
		RunE: func(cmd *cobra.Command, args []string) error {
			ref, err := target(args[1])
			if err != nil {
				return err
			}
			show := progress.New(flags, cmd.OutOrStdout(), cmd.ErrOrStderr())
			c, err := flags.Client(ref.Host, show.Note)
			if err != nil {
				return err
			}
			defer c.Close()
			pushed, err := transfer.Push(cmd.Context(), c, args[0], ref, transfer.PushOptions{
				FollowLinks: r.follow, Snapshot: r.snapshot, AllowIncompleteFamily: incomplete, Annotations: given(about),
				Watch: show.Watch,
			})
			if err != nil {
				show.Abandon()
				return explainPush(explain(err))
			}
			show.Close()
			warn(cmd.ErrOrStderr(), pushed.Warnings)
			return printPushed(cmd.OutOrStdout(), pushed, flags.JSON)
		},
	}
	flags.Bind(cmd)
	r.bind(cmd)
	cmd.Flags().BoolVar(&incomplete, "allow-incomplete-family", false, "push although files of a numbered set are missing")
	for name, what := range map[string]string{
		"source": "where the model comes from", "revision": "which revision of it this is",
		"licenses": "SPDX licence expression",
	} {
		about["org.opencontainers.image."+name] = cmd.Flags().String(name, "", what+"; part of the digest")
	}
	return cmd
}

func given(about map[string]*string) map[string]string {
	annotations := map[string]string{}
	for key, value := range about {
		if *value != "" {
			annotations[key] = *value
		}
	}
	return annotations
}

// explainPush adds what is particular to a push.
func explainPush(err error) error {
	switch {
	case errors.Is(err, api.ErrDigestInvalid), errors.Is(err, api.ErrSizeInvalid):
		return cli.Hint(err, "the bytes changed on the way: run it again; if that repeats, check this machine's memory and disk")
	case errors.Is(err, api.ErrManifestBlobUnknown):
		err = cli.Exit(cli.CodeTryAgain, err)
		return cli.Hint(err, "the registry dropped a blob meanwhile; the same command sends it again")
	}
	return err
}

func printPushed(stdout io.Writer, p transfer.Pushed, asJSON bool) error {
	if asJSON {
		return json.NewEncoder(stdout).Encode(struct {
			Event string `json:"event"`
			transfer.Pushed
		}{"pushed", p})
	}
	_, err := fmt.Fprintf(stdout, "aggregate %s\ndigest    %s\nreference %s\n", p.Identity.Aggregate, p.Digest, p.Reference)
	return err
}
