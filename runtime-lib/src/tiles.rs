//! The system's permission to use the tile registers of AMX, whose eight kilobytes it saves for those processes only that ask for it.
//!
//! In: nothing. Out: whether this process may execute tile instructions, threads that exist or come later included. A process without
//! permission gets SIGILL. Source: Linux, Documentation/arch/x86/xstate.rst.

/// `ARCH_REQ_XCOMP_PERM` of `arch_prctl`.
#[cfg(target_arch = "x86_64")]
const REQUEST_PERMISSION: libc::c_long = 0x1023;
/// State component of the tiles' data.
#[cfg(target_arch = "x86_64")]
const TILE_DATA: libc::c_long = 18;

/// Asks for it; false where the CPU has no tiles, the system does not know them or does not allow them. It can be asked for again.
pub fn permit() -> bool {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the call takes two numbers and changes nothing but what this process may use.
    let granted = unsafe { libc::syscall(libc::SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) } == 0;
    #[cfg(not(target_arch = "x86_64"))]
    let granted = false;
    granted
}
