// Checks vectors.json with nothing but Node's standard library.
//
// It is also an example: copy key() to take the same locks from JavaScript. The key is a BigInt,
// because a number loses digits above 2^53; pg sends it as text.

import { createHash } from 'node:crypto'
import { readFileSync } from 'node:fs'

const key = (namespace, id) =>
  createHash('sha256').update(`${namespace}:${id}`, 'utf8').digest().readBigInt64BE(0)

const { vectors } = JSON.parse(readFileSync(new URL('vectors.json', import.meta.url), 'utf8'))
let wrong = 0
for (const v of vectors) {
  const got = key(v.namespace, v.id)
  if (String(got) !== v.key) {
    wrong++
    console.error(`${v.namespace}:${JSON.stringify(v.id)}: got ${got}, want ${v.key}`)
  }
}
console.log(`${vectors.length} vectors, ${wrong} wrong`)
process.exitCode = wrong || !vectors.length ? 1 : 0
