// Package db is sqlc's output for the statements in queries: `make generate` writes every other file here.
//
// Its types are latchkey's own and may change with any migration. A host imports repository.
package db
