// Rows of sequences that decode, planned and taken in all at once. `engine/core/rows.py` has the meaning of the cells.
#pragma once
#include <stdint.h>

enum {
    ROW_NUMBER, ROW_ADMISSION, ROW_SLOT, ROW_COMPUTED, ROW_LAST, ROW_KNOWN, ROW_SAMPLING, ROW_DRAFTING, ROW_DONE,
    ROW_MOST, ROW_ROOM, ROW_FLAGS, ROW_PLANNED, ROW_KEPT, ROW_PASSED
};
enum { COLUMN_BLOCKS = ROW_LAST + 1 }; // columns of a plan begin like the cells, then have blocks and n_passed by group
#define ROW_BLOCK_TOKENS 16
#define ROW_RECENT 32 // tokens by slot that the sequence itself may lack

typedef struct {
    int64_t *cells;  // [ROW_PASSED + n_groups, n_slots]
    int64_t n_slots; // of each row
    int64_t n_groups;
    // Of the step being planned, by rank; those that are not plain are planned one by one:
    uint8_t *plain;
    int64_t *n_dues;   // tokens to compute
    int64_t *found[2]; // results of functions that find places
    int32_t *recent;   // [n_slots, ROW_RECENT]; the newest tokens of sequences, which have only ROW_KEPT tokens themselves
} row_table;

static inline int64_t *row_of(const row_table *rows, int64_t row) { return rows->cells + row * rows->n_slots; }

// Finds sequences that decode one token each, and nothing about them is unusual: `plain`. The slots are given by rank.
// Also writes how many tokens each has to compute. Returns the flags that any of them has, in the next 16 bits
// those that all have, and the number of plain ones in the upper half.
int64_t em_rows_find(const row_table *rows, const int64_t *slots, int64_t n, int64_t unusual) {
    const int64_t *known = row_of(rows, ROW_KNOWN), *sampling = row_of(rows, ROW_SAMPLING);
    const int64_t *computed = row_of(rows, ROW_COMPUTED), *drafting = row_of(rows, ROW_DRAFTING);
    const int64_t *flags = row_of(rows, ROW_FLAGS), *most = row_of(rows, ROW_MOST);
    int64_t any_flags = 0, common_flags = 0xFFFF, n_plain = 0;
    for (int64_t i = 0; i < n; i++) {
        int64_t slot = slots[i], ahead = known[slot] + sampling[slot];
        rows->n_dues[i] = ahead - computed[slot];
        rows->plain[i] = rows->n_dues[i] == 1 && !(flags[slot] & unusual) && !drafting[slot] && ahead < most[slot];
        any_flags |= flags[slot], common_flags &= flags[slot];
        n_plain += rows->plain[i];
    }
    return any_flags | common_flags << 16 | n_plain << 32;
}

// Returns the tokens that sequences have to compute before their next ones are sampled. unsampled: flag of those after
// whose last token nothing is sampled. Free slots have zeros.
int64_t em_rows_prefill(const row_table *rows, int64_t unsampled) {
    const int64_t *known = row_of(rows, ROW_KNOWN), *sampling = row_of(rows, ROW_SAMPLING);
    const int64_t *computed = row_of(rows, ROW_COMPUTED), *flags = row_of(rows, ROW_FLAGS);
    int64_t sum = 0;
    for (int64_t slot = 0; slot < rows->n_slots; slot++) {
        int64_t n = known[slot] + sampling[slot] - computed[slot] - !(flags[slot] & unsampled);
        sum += n > 0 ? n : 0;
    }
    return sum;
}

// Finds the sequences that are not plain and have something to compute, and those whose block tables change with their
// next tokens: their places, and how many plain sequences are before each. Returns how many there are, and the number of
// all plain sequences in the upper half.
int64_t em_rows_look(const row_table *rows, const int64_t *slots, int64_t n) {
    const int64_t *computed = row_of(rows, ROW_COMPUTED), *room = row_of(rows, ROW_ROOM);
    int64_t count = 0, before = 0;
    for (int64_t i = 0; i < n; i++) {
        if (rows->plain[i] ? computed[slots[i]] >= room[slots[i]] : rows->n_dues[i] > 0)
            rows->found[0][count] = i, rows->found[1][count++] = before;
        before += rows->plain[i];
    }
    return count | before << 32;
}

// Plans a token of each plain sequence: columns are int32 [COLUMN_BLOCKS + 2 * n_groups, n_plain], without new blocks.
void em_rows_plan(const row_table *rows, const int64_t *slots, int64_t n, int64_t n_plain, int64_t step,
                  int32_t *columns) {
    int64_t *computed = row_of(rows, ROW_COMPUTED), *sampling = row_of(rows, ROW_SAMPLING);
    int64_t *planned = row_of(rows, ROW_PLANNED);
    for (int64_t i = 0, column = 0; i < n; i++) {
        if (!rows->plain[i]) continue;
        int64_t slot = slots[i];
        int32_t *to = columns + column++;
        for (int row = 0; row < COLUMN_BLOCKS; row++, to += n_plain) *to = (int32_t)row_of(rows, row)[slot];
        if (sampling[slot]) *(to - n_plain) = -1; // the device knows the token
        for (int64_t g = 0; g < rows->n_groups; g++, to += n_plain) *to = -1;
        for (int64_t g = 0; g < rows->n_groups; g++, to += n_plain) *to = (int32_t)row_of(rows, ROW_PASSED + g)[slot];
        computed[slot]++, sampling[slot]++, planned[slot] = step;
    }
}

// Takes in the draws of planned columns, one each. Left are those whose sequence has left its slot, is unusual or at its
// end or lacks too many tokens, and draws that are invalid or marked in `stops`. Finds the places of those that are left,
// and of those with which a block is full. Returns how many are left, and the number of full blocks in the upper half.
int64_t em_rows_take(const row_table *rows, const int32_t *columns, int64_t n, const int32_t *ids, const uint8_t *stops,
                     int64_t unusual) {
    const int64_t *admissions = row_of(rows, ROW_ADMISSION), *flags = row_of(rows, ROW_FLAGS);
    const int64_t *most = row_of(rows, ROW_MOST), *kept = row_of(rows, ROW_KEPT);
    int64_t *known = row_of(rows, ROW_KNOWN), *sampling = row_of(rows, ROW_SAMPLING);
    int64_t *last = row_of(rows, ROW_LAST), *done = row_of(rows, ROW_DONE), n_left = 0, n_full = 0;
    for (int64_t i = 0; i < n; i++) {
        int64_t slot = columns[ROW_SLOT * n + i];
        if (admissions[slot] != columns[ROW_ADMISSION * n + i] || (flags[slot] & unusual) || ids[i] < 0 ||
            known[slot] + 1 >= most[slot] || known[slot] - kept[slot] == ROW_RECENT || (stops && stops[i])) {
            rows->found[0][n_left++] = i;
            continue;
        }
        rows->recent[slot * ROW_RECENT + known[slot] - kept[slot]] = ids[i];
        known[slot]++, sampling[slot]--;
        last[slot] = ids[i];
        done[slot] = columns[ROW_COMPUTED * n + i] + 1;
        if (done[slot] % ROW_BLOCK_TOKENS == 0) rows->found[1][n_full++] = i;
    }
    return n_left | n_full << 32;
}
