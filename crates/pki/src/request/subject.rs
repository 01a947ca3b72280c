//! Writes the subject of a certificate with its attributes in Go's order
//! (`crypto/x509/pkix.Name.ToRDNSequence`). Requests may have any order, but tools that compare
//! subjects as text expect Go's.

use x509_parser::x509::{AttributeTypeAndValue, X509Name};

use crate::der;

/// The object identifiers of country, organization, organizational unit, locality, province, street,
/// postal code, common name and serial number, in Go's order.
const ORDER: [&[u8]; 9] = [
    &[0x55, 4, 6],
    &[0x55, 4, 10],
    &[0x55, 4, 11],
    &[0x55, 4, 7],
    &[0x55, 4, 8],
    &[0x55, 4, 9],
    &[0x55, 4, 17],
    COMMON_NAME,
    SERIAL_NUMBER,
];
const COMMON_NAME: &[u8] = &[0x55, 4, 3];
const SERIAL_NUMBER: &[u8] = &[0x55, 4, 5];

/// The DER-encoded name. Values of one attribute type share a set. Of common names and serial numbers
/// the last one is kept. Attributes that Go does not know follow in the order of the request.
pub(super) fn encode_in_go_order(name: &X509Name<'_>) -> Vec<u8> {
    let attributes: Vec<(&[u8], Vec<u8>)> = name
        .iter_attributes()
        .map(|attribute| (attribute.attr_type().as_bytes(), encoded(attribute)))
        .collect();
    let mut sets: Vec<Vec<u8>> = Vec::new();
    for known in ORDER {
        let mut values: Vec<&[u8]> =
            attributes.iter().filter(|(kind, _)| *kind == known).map(|(_, value)| value.as_slice()).collect();
        if [COMMON_NAME, SERIAL_NUMBER].contains(&known) {
            values.drain(..values.len().saturating_sub(1));
        }
        // DER requires the members of a SET OF to be sorted.
        values.sort_unstable();
        if !values.is_empty() {
            sets.push(der::tagged(0x31, &values.concat()));
        }
    }
    let unknown = attributes.iter().filter(|(kind, _)| !ORDER.contains(kind));
    sets.extend(unknown.map(|(_, value)| der::tagged(0x31, value)));
    der::sequence(&sets)
}

fn encoded(attribute: &AttributeTypeAndValue<'_>) -> Vec<u8> {
    let value = attribute.attr_value();
    // All string types have tags below 31, which fit into one byte.
    let tag = u8::try_from(value.tag().0).unwrap_or_default();
    der::sequence(&[der::tagged(0x06, attribute.attr_type().as_bytes()), der::tagged(tag, value.data)])
}
