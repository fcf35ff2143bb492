//! How much of a session's areas steps have written to. The kernel finds memory for a page when it is first written to, and ends a process
//! whose control group has none left: that is asked before.
//!
//! In: what the next step writes to. Out: the bytes that are new in it, or the error that there is no room for them.

use crate::abi::{PAGE_POSITIONS, Tile};
use crate::area::{MemoryUse, ResourceError, room_for};

/// A large page: what is given where a byte of it is written to, if the kernel has one left. (The first small pages of keys and values are
/// ordinary ones.)
const LARGE_PAGE: u64 = 2 << 20;

/// Bytes of a session's areas, as far as steps have written to them. What a small step leaves of the arena counts as written to.
#[derive(Clone)]
pub(super) struct Growth {
    arena: u64,
    /// Bytes of a page of keys and values, and pages of a slot.
    page_bytes: u64,
    pages_per_slot: u64,
    /// Which large pages of keys and values are written to.
    large_pages: Vec<bool>,
    /// Counted, but not written to yet.
    ahead: u64,
}

impl Growth {
    /// Nothing is written to yet; the first step takes all of the areas of `always` bytes.
    pub(super) fn new(always: u64, state_bytes: u64, page_bytes: u64, pages_per_slot: u64) -> Growth {
        Growth { arena: 0, page_bytes, pages_per_slot, large_pages: vec![false; state_bytes.div_ceil(LARGE_PAGE) as usize], ahead: always }
    }

    /// Before a step that uses so many bytes of the arena and keys up to the ends of these tiles.
    pub(super) fn admit(&mut self, arena: u64, tiles: &[Tile]) -> Result<(), ResourceError> {
        self.count(arena, tiles);
        if self.ahead > 0 {
            room_for(MemoryUse::Step, self.ahead)?;
            self.ahead = 0;
        }
        Ok(())
    }

    /// The bytes that such steps would be the first to write to.
    pub(super) fn asked(&self, arena: u64, tiles: &[Tile]) -> u64 {
        let mut then = self.clone();
        then.count(arena, tiles);
        then.ahead
    }

    fn count(&mut self, arena: u64, tiles: &[Tile]) {
        self.ahead += arena.saturating_sub(self.arena);
        self.arena = self.arena.max(arena);
        for tile in tiles {
            let slot = tile.slot as u64 * self.pages_per_slot * self.page_bytes;
            let used = (tile.key_end as u64).div_ceil(PAGE_POSITIONS as u64) * self.page_bytes;
            let large_pages = slot / LARGE_PAGE..(slot + used).div_ceil(LARGE_PAGE);
            // (An encoder has slots without keys and values.)
            for written in self.large_pages.iter_mut().take(large_pages.end as usize).skip(large_pages.start as usize) {
                self.ahead += if *written { 0 } else { LARGE_PAGE };
                *written = true;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tile(slot: i32, key_end: i32) -> Tile {
        Tile { row_begin: 0, row_count: 1, slot, key_end }
    }

    #[test]
    fn what_is_new_counts_once() {
        // Two slots of five pages of half a large page.
        let mut growth = Growth::new(7, 5 * LARGE_PAGE, LARGE_PAGE / 2, 5);
        let mut ahead = |arena, tiles: &[Tile]| {
            growth.count(arena, tiles);
            std::mem::take(&mut growth.ahead)
        };
        assert_eq!(ahead(100, &[tile(0, 1)]), 7 + 100 + LARGE_PAGE);
        // The same large page, and one more by two tiles of one slot.
        assert_eq!(ahead(50, &[tile(0, 300)]), 0);
        assert_eq!(ahead(120, &[tile(0, 300), tile(0, 513)]), 20 + LARGE_PAGE);
        // The second slot begins in the third large page.
        assert_eq!(ahead(0, &[tile(0, 2), tile(1, 256)]), LARGE_PAGE);
        assert_eq!(ahead(0, &[tile(0, 1280), tile(1, 1280)]), 2 * LARGE_PAGE);
        // Without a cache there is nothing.
        assert_eq!((Growth::new(0, 0, 0, 0).large_pages.len(), ahead(0, &[])), (0, 0));
    }
}
