// BLAKE2b (RFC 7693) without a key. Browsers have no BLAKE2b; with this, digests are also checked on pages without TLS.
//
// 64-bit words are pairs of 32-bit numbers (low, high): BigInt is twenty times slower.
const IV = new Uint32Array([
  0xf3bcc908, 0x6a09e667, 0x84caa73b, 0xbb67ae85, 0xfe94f82b, 0x3c6ef372, 0x5f1d36f1, 0xa54ff53a,
  0xade682d1, 0x510e527f, 0x2b3e6c1f, 0x9b05688c, 0xfb41bd6b, 0x1f83d9ab, 0x137e2179, 0x5be0cd19,
]);
const SIGMA = [
  [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15], [14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3],
  [11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4], [7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8],
  [9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13], [2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9],
  [12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11], [13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10],
  [6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5], [10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0],
];
const BLOCK_BYTES = 128;
const v = new Uint32Array(32), m = new Uint32Array(32);

function add(a, low, high) {
  const sum = v[a] + low;
  v[a + 1] = v[a + 1] + high + (sum >= 0x100000000 ? 1 : 0);
  v[a] = sum;
}

/** v[d] = rotate_right(v[d] ^ v[a], bits) */
function mix(d, a, bits) {
  const low = v[d] ^ v[a], high = v[d + 1] ^ v[a + 1];
  if (bits === 32) { v[d] = high; v[d + 1] = low; }
  else if (bits === 63) { v[d] = (low << 1) | (high >>> 31); v[d + 1] = (high << 1) | (low >>> 31); }
  else { v[d] = (low >>> bits) | (high << (32 - bits)); v[d + 1] = (high >>> bits) | (low << (32 - bits)); }
}

function g(a, b, c, d, x, y) {
  add(a, v[b], v[b + 1]); add(a, m[x], m[x + 1]); mix(d, a, 32);
  add(c, v[d], v[d + 1]); mix(b, c, 24);
  add(a, v[b], v[b + 1]); add(a, m[y], m[y + 1]); mix(d, a, 16);
  add(c, v[d], v[d + 1]); mix(b, c, 63);
}

export class Blake2b {
  constructor(digestBytes = 16) {
    this.digestBytes = digestBytes;
    this.state = IV.slice();
    this.state[0] ^= 0x01010000 ^ digestBytes;
    this.block = new Uint8Array(BLOCK_BYTES);
    this.filled = 0;
    this.total = 0;
  }

  /** Reads bytes. A full block is compressed only when more follows: the last block is marked as the last. */
  update(bytes) {
    let at = 0;
    while (at < bytes.length) {
      if (this.filled === BLOCK_BYTES) { this.total += BLOCK_BYTES; compress(this.state, this.block, this.total, false); this.filled = 0; }
      const taken = Math.min(BLOCK_BYTES - this.filled, bytes.length - at);
      this.block.set(bytes.subarray(at, at + taken), this.filled);
      this.filled += taken;
      at += taken;
    }
    return this;
  }

  /** The digest of what has been read, in hexadecimal digits. More can be read afterwards. */
  hex() {
    const state = this.state.slice(), block = this.block.slice();
    block.fill(0, this.filled);
    compress(state, block, this.total + this.filled, true);
    return Array.from(new Uint8Array(state.buffer, 0, this.digestBytes), (byte) => byte.toString(16).padStart(2, "0")).join("");
  }
}

function compress(state, block, total, isLast) {
  v.set(state);
  v.set(IV, 16);
  v[24] ^= total;
  v[25] ^= total / 0x100000000;
  if (isLast) { v[28] = ~v[28]; v[29] = ~v[29]; }
  m.set(new Uint32Array(block.buffer, block.byteOffset, 32));
  for (let round = 0; round < 12; round++) {
    const s = SIGMA[round % 10];
    g(0, 8, 16, 24, 2 * s[0], 2 * s[1]); g(2, 10, 18, 26, 2 * s[2], 2 * s[3]);
    g(4, 12, 20, 28, 2 * s[4], 2 * s[5]); g(6, 14, 22, 30, 2 * s[6], 2 * s[7]);
    g(0, 10, 20, 30, 2 * s[8], 2 * s[9]); g(2, 12, 22, 24, 2 * s[10], 2 * s[11]);
    g(4, 14, 16, 26, 2 * s[12], 2 * s[13]); g(6, 8, 18, 28, 2 * s[14], 2 * s[15]);
  }
  for (let index = 0; index < 16; index++) state[index] ^= v[index] ^ v[index + 16];
}
