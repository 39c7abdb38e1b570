// Package queries holds every statement that latchkey sends, one file per table, in the form that sqlc reads.
// It is a package so that vendoring carries the files to a host, whose DBAs review them and whose
// `sqlc generate` reads them.
package queries

import "embed"

// FS holds the .sql files.
//
//go:embed *.sql
var FS embed.FS
