// Suffix index: where the last tokens of a text occurred before, and what followed them. A match finder with hash
// chains: every position is linked to the previous one whose last LONG (or SHORT) tokens have the same hash.
#pragma once
#include "rows.h"
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define SUFFIX_LONG 4
#define SUFFIX_SHORT 1
#define SUFFIX_MATCH 64       // longest match that is told apart
#define SUFFIX_CANDIDATES 24  // latest occurrences that are looked at, per index
#define SUFFIX_DRAFT 64       // longest draft
#define SUFFIX_BREAK UINT32_MAX // between texts: equals no token

typedef struct {
    uint32_t *tokens;     // [size], a ring: token p is at p % size
    uint32_t *earlier[2]; // [size] by order: 1 + the previous position in the chain; 0: none
    uint32_t *latest[2];  // [size] by hash: 1 + the last position of the chain; 0: none
    uint64_t size;        // a power of two
    uint64_t n;           // tokens so far; the last `size` of them are known
    int64_t used;         // number of the last step that asked it
} suffix_index;

typedef struct {
    int64_t most;          // draft tokens
    float factor;          // a match of m tokens allows factor * m draft tokens
    float min_probability; // of the whole draft up to a token
    float shares[2];       // of the occurrences that go on like this, below which a token is another cell
    uint8_t match_cell[SUFFIX_MATCH + SUFFIX_DRAFT]; // by length of the match before a token: its first cell
} suffix_policy;

typedef struct {
    suffix_index *index[2]; // or null
    int64_t n_context;      // tokens of the text that is to be continued
} suffix_request;

typedef struct {
    int64_t number;         // of the sequence in the slot; -1: not known
    suffix_index *index[2]; // the sequence's own; its tenant's, or null
    int64_t n_skipped;      // leading tokens of the sequence that are not in its own index
} suffix_slot;

#define SUFFIX_LEFT UINT8_MAX // in place of a number of tokens: the caller has to look at this sequence

typedef struct {
    uint8_t n;     // tokens of the draft
    int32_t match; // length of the match
    uint32_t draft[SUFFIX_DRAFT];
    float probability[SUFFIX_DRAFT]; // of the draft up to this token, by what followed the match before
    uint8_t cell[SUFFIX_DRAFT];      // the situation of each token
} suffix_draft;

typedef struct {
    const suffix_index *index;
    uint64_t next; // position behind the match
    int64_t match;
} suffix_occurrence;

static const int64_t suffix_order[2] = {SUFFIX_LONG, SUFFIX_SHORT};

static inline uint64_t suffix_hash(uint64_t hash, uint32_t token) {
    hash = (hash ^ token) * 0x9E3779B97F4A7C15u;
    return hash ^ hash >> 29;
}

void em_suffix_free(suffix_index *s) {
    if (!s) return;
    free(s->tokens);
    for (int order = 0; order < 2; order++) free(s->earlier[order]), free(s->latest[order]);
    free(s);
}

suffix_index *em_suffix_new(uint64_t size) {
    suffix_index *s = calloc(1, sizeof *s);
    if (!s) return NULL;
    s->size = size;
    int failed = !(s->tokens = malloc(size * sizeof(uint32_t)));
    for (int order = 0; order < 2; order++) {
        failed |= !(s->earlier[order] = malloc(size * sizeof(uint32_t)));
        failed |= !(s->latest[order] = calloc(size, sizeof(uint32_t)));
    }
    if (!failed) return s;
    em_suffix_free(s);
    return NULL;
}

static void suffix_append(suffix_index *s, uint32_t token) {
    uint64_t mask = s->size - 1, at = s->n++;
    s->tokens[at & mask] = token;
    for (int order = 0; order < 2; order++) {
        int64_t length = suffix_order[order];
        s->earlier[order][at & mask] = 0;
        if (at + 1 < (uint64_t)length || token == SUFFIX_BREAK) continue;
        uint64_t hash = 0;
        for (int64_t i = 0; i < length; i++) hash = suffix_hash(hash, s->tokens[(at - i) & mask]);
        uint32_t *latest = &s->latest[order][hash & mask];
        s->earlier[order][at & mask] = *latest;
        *latest = (uint32_t)at + 1;
    }
}

// Fetches the memory that the next token needs, which is not in the cache.
static void suffix_fetch(const suffix_index *s, uint32_t token) {
    uint64_t mask = s->size - 1, hash = suffix_hash(0, token);
    __builtin_prefetch(&s->latest[1][hash & mask], 1);
    for (int64_t i = 1; i < SUFFIX_LONG; i++) hash = suffix_hash(hash, s->tokens[(s->n - i) & mask]);
    __builtin_prefetch(&s->latest[0][hash & mask], 1);
    for (int order = 0; order < 2; order++) __builtin_prefetch(&s->earlier[order][s->n & mask], 1);
}

// Appends a text, or more of the last one. The caller starts a new index before 2^32 tokens.
void em_suffix_extend(suffix_index *s, const uint32_t *tokens, int64_t n, int32_t breaks) {
    for (int64_t i = 0; i < n; i++) suffix_append(s, tokens[i]);
    if (breaks) suffix_append(s, SUFFIX_BREAK);
}

// The latest occurrences of the context's end, of the longer order if there are any. is_end: it ends the index's own text.
static int64_t suffix_find(const suffix_index *s, const uint32_t *context, int64_t n, int is_end,
                           suffix_occurrence *found) {
    uint64_t mask = s->size - 1, first = s->n > s->size ? s->n - s->size : 0;
    int64_t count = 0;
    for (int order = 0; order < 2 && !count; order++) {
        int64_t length = suffix_order[order];
        if (n < length) continue;
        uint64_t hash = 0;
        for (int64_t i = 0; i < length && !is_end; i++) hash = suffix_hash(hash, context[n - 1 - i]);
        uint64_t chain = is_end ? s->earlier[order][(s->n - 1) & mask] : s->latest[order][hash & mask];
        for (int64_t steps = is_end; chain && steps < SUFFIX_CANDIDATES; steps++) {
            uint64_t at = chain - 1;
            if (at < first) break; // overwritten, and so are all before it
            int64_t most = n < SUFFIX_MATCH ? n : SUFFIX_MATCH, match = 0;
            if (most > (int64_t)(at - first + 1)) most = (int64_t)(at - first + 1);
            while (match < most && s->tokens[(at - match) & mask] == context[n - 1 - match]) match++;
            if (match >= length && at + 1 < s->n)
                found[count++] = (suffix_occurrence){s, at + 1, match};
            chain = s->earlier[order][at & mask];
        }
    }
    return count;
}

// The most frequent continuation of the occurrences; among equals the first one's.
static int64_t suffix_follow(suffix_occurrence *alive, int64_t count, int64_t most, float min_probability,
                             uint32_t *draft, float *probability) {
    float likely = 1.f;
    int64_t n = 0;
    while (n < most && count) {
        uint32_t next[2 * SUFFIX_CANDIDATES], best = SUFFIX_BREAK;
        int64_t best_count = 0, with_next = 0;
        for (int64_t i = 0; i < count; i++) {
            const suffix_index *s = alive[i].index;
            next[i] = alive[i].next < s->n ? s->tokens[alive[i].next & (s->size - 1)] : SUFFIX_BREAK;
            with_next += alive[i].next < s->n; // a text that ended there counts: the draft would be wrong
        }
        for (int64_t i = 0; i < count; i++) {
            if (next[i] == SUFFIX_BREAK || next[i] == best) continue;
            int64_t equal = 0;
            for (int64_t j = i; j < count; j++) equal += next[j] == next[i];
            if (equal > best_count) best = next[i], best_count = equal;
            if (2 * best_count >= count) break;
        }
        if (!best_count) break;
        likely *= (float)best_count / (float)with_next;
        if (likely < min_probability) break;
        draft[n] = best, probability[n++] = likely;
        int64_t kept = 0;
        for (int64_t i = 0; i < count; i++)
            if (next[i] == best) alive[kept] = alive[i], alive[kept++].next++;
        count = kept;
    }
    return n;
}

// Continues the longest match as it went on most often. is_end: the context ends the text of the first index.
static void suffix_propose(const suffix_policy *policy, suffix_index *const index[2], const uint32_t *context,
                           int64_t n_context, int is_end, suffix_draft *to) {
    suffix_occurrence found[2 * SUFFIX_CANDIDATES];
    int64_t count = 0, longest = 0, kept = 0;
    for (int i = 0; i < 2; i++)
        if (index[i]) count += suffix_find(index[i], context, n_context, is_end && !i, found + count);
    for (int64_t i = 0; i < count; i++)
        if (found[i].match > longest) longest = found[i].match;
    for (int64_t i = 0; i < count; i++)
        if (found[i].match == longest) found[kept++] = found[i];
    int64_t most = (int64_t)(policy->factor * (float)longest);
    if (most > policy->most) most = policy->most;
    if (most > SUFFIX_DRAFT) most = SUFFIX_DRAFT;
    to->match = (int32_t)longest;
    to->n = (uint8_t)suffix_follow(found, kept, most, policy->min_probability, to->draft, to->probability);
    float before = 1.f;
    for (int i = 0; i < to->n; i++) {
        float share = to->probability[i] / before;
        before = to->probability[i];
        to->cell[i] = (uint8_t)(policy->match_cell[longest + i] + (share < policy->shares[0]) + (share < policy->shares[1]));
    }
}

// The drafts of many sequences, whose contexts follow each other.
void em_suffix_propose(const suffix_policy *policy, const suffix_request *requests, int64_t n_requests,
                       const uint32_t *contexts, suffix_draft *to) {
    for (const suffix_request *request = requests; request < requests + n_requests; request++) {
        suffix_propose(policy, request->index, contexts, request->n_context, 0, to++);
        contexts += request->n_context;
    }
}

// The drafts of sequences whose indexes were asked in the last step, too, and have all their tokens but the last one.
// The draft of any other sequence is SUFFIX_LEFT. Returns how many drafts are not empty.
int64_t em_suffix_step(const suffix_policy *policy, suffix_slot *table, const row_table *rows, const int64_t *slots,
                       int64_t n_slots, int64_t step, suffix_draft *to) {
    const int64_t *numbers = row_of(rows, ROW_NUMBER), *known = row_of(rows, ROW_KNOWN), *last = row_of(rows, ROW_LAST);
    int64_t count = 0;
    for (const int64_t *slot = slots; slot < slots + n_slots; slot++, to++) {
        if (slot + 8 < slots + n_slots) __builtin_prefetch(table[slot[8]].index[0]);
        if (slot + 4 < slots + n_slots && table[slot[4]].number == numbers[slot[4]])
            suffix_fetch(table[slot[4]].index[0], (uint32_t)last[slot[4]]);
        suffix_slot *at = table + *slot;
        suffix_index *own = at->index[0];
        int64_t n_new = at->number == numbers[*slot] ? known[*slot] - at->n_skipped - (int64_t)own->n : -1;
        if (n_new < 0 || n_new > 1 || own->used < step - 1) {
            to->n = SUFFIX_LEFT, count++;
            continue;
        }
        if (n_new) suffix_append(own, (uint32_t)last[*slot]);
        own->used = step;
        if (at->index[1]) at->index[1]->used = step;
        uint32_t copied[SUFFIX_MATCH];
        int64_t n = own->n < SUFFIX_MATCH ? (int64_t)own->n : SUFFIX_MATCH;
        uint64_t first = (own->n - n) & (own->size - 1);
        const uint32_t *context = own->tokens + first;
        if (first + n > own->size) { // around the end of the ring
            for (int64_t i = 0; i < n; i++) copied[i] = own->tokens[(first + i) & (own->size - 1)];
            context = copied;
        }
        suffix_propose(policy, at->index, context, n, 1, to);
        count += to->n > 0;
    }
    return count;
}
