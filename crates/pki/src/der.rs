//! Encodes the few DER types that certificates consist of.

use jiff::Timestamp;

/// Encodes a value with its tag and length.
pub fn tagged(tag: u8, value: &[u8]) -> Vec<u8> {
    let mut out = vec![tag];
    match value.len() {
        short @ 0..=127 => out.push(short as u8),
        long => {
            let bytes = long.to_be_bytes();
            let used = &bytes[bytes.iter().take_while(|byte| **byte == 0).count()..];
            out.push(0x80 | used.len() as u8);
            out.extend(used);
        }
    }
    out.extend(value);
    out
}

pub fn sequence(parts: &[Vec<u8>]) -> Vec<u8> {
    tagged(0x30, &parts.concat())
}

/// A named BIT STRING, most significant bit first. Trailing zero bits are removed, as DER requires.
pub fn bits(bits: u16) -> Vec<u8> {
    let unused = bits.trailing_zeros().min(16) as u8;
    let bytes = bits.to_be_bytes();
    let used = if unused >= 8 { &bytes[..1] } else { &bytes[..] };
    tagged(0x03, &[&[unused % 8], used].concat())
}

/// UTCTime up to the year 2049, GeneralizedTime from 2050 on (RFC 5280, section 4.1.2.5).
pub fn time(at: Timestamp) -> Vec<u8> {
    let long = at.strftime("%Y%m%d%H%M%SZ").to_string();
    match long.as_str() < "2050" {
        true => tagged(0x17, &long.as_bytes()[2..]),
        false => tagged(0x18, long.as_bytes()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_bits_and_times() {
        assert_eq!(tagged(4, &[1, 2]), [4, 2, 1, 2]);
        assert_eq!(tagged(4, &[0; 200])[..3], [4, 0x81, 200]);
        assert_eq!(tagged(4, &[0; 300])[..4], [4, 0x82, 1, 44]);
        assert_eq!(bits(0x8000), [3, 2, 7, 0x80]);
        assert_eq!(bits(0xa000), [3, 2, 5, 0xa0]);
        assert_eq!(bits(0x0080), [3, 3, 7, 0, 0x80]);
        let at = |text: &str| text.parse::<Timestamp>().unwrap();
        assert_eq!(time(at("2049-12-31T23:59:59Z"))[..5], [0x17, 13, b'4', b'9', b'1']);
        assert_eq!(time(at("2050-01-01T00:00:00Z"))[..4], [0x18, 15, b'2', b'0']);
    }
}
