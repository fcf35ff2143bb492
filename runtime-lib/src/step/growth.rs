//! How much of a session's areas steps have written to. The kernel finds memory for a page when it is first written to, and ends a process
//! whose control group has none left: that is asked before.
//!
//! In: what the next step writes to. Out: the bytes that are new in it, or the error that there is no room for them.

use super::StepError;
use crate::abi::{PAGE_POSITIONS, Tile};
use crate::cgroup;

/// Memory beside the areas that is written to meanwhile: tables of pages, texts, the rest of a large page.
const MARGIN: u64 = 2 << 20;

/// Bytes of a session's areas, as far as steps have written to them.
pub(super) struct Growth {
    arena: u64,
    /// Pages of keys and values per slot.
    pages: Vec<u32>,
    page_bytes: u64,
    /// Counted, but not written to yet.
    ahead: u64,
}

impl Growth {
    /// Nothing is written to yet; the first step takes all of the areas of `always` bytes.
    pub(super) fn new(always: u64, slots: usize, page_bytes: u64) -> Growth {
        Growth { arena: 0, pages: vec![0; slots], page_bytes, ahead: always }
    }

    /// Before a step that uses so many bytes of the arena and keys up to the ends of these tiles.
    pub(super) fn admit(&mut self, arena: u64, tiles: &[Tile]) -> Result<(), StepError> {
        self.count(arena, tiles);
        if self.ahead > 0 {
            room_for("the step", self.ahead)?;
            self.ahead = 0;
        }
        Ok(())
    }

    fn count(&mut self, arena: u64, tiles: &[Tile]) {
        self.ahead += arena.saturating_sub(self.arena);
        self.arena = self.arena.max(arena);
        for tile in tiles {
            let pages = (tile.key_end as u32).div_ceil(PAGE_POSITIONS as u32);
            let held = &mut self.pages[tile.slot as usize];
            self.ahead += u64::from(pages.saturating_sub(*held)) * self.page_bytes;
            *held = pages.max(*held);
        }
    }
}

/// Whether the control group has room for `bytes` more.
pub(crate) fn room_for(what: &'static str, bytes: u64) -> Result<(), StepError> {
    let bytes = bytes.saturating_add(MARGIN);
    match cgroup::memory_room() {
        Some(room) if room < bytes => Err(StepError::Room { what, bytes, room }),
        _ => Ok(()),
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
        let mut growth = Growth::new(7, 2, 1000);
        let mut ahead = |arena, tiles: &[Tile]| {
            growth.count(arena, tiles);
            std::mem::take(&mut growth.ahead)
        };
        assert_eq!(ahead(100, &[tile(0, 1)]), 7 + 100 + 1000);
        // The same page, and two pages more by two tiles of one slot.
        assert_eq!(ahead(50, &[tile(0, 256)]), 0);
        assert_eq!(ahead(120, &[tile(0, 300), tile(0, 513)]), 20 + 2000);
        assert_eq!(ahead(0, &[tile(0, 2), tile(1, 256)]), 1000);
    }
}
