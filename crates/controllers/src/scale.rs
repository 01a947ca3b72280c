//! The `scale` subresource of kinds that are discovered at run time.

use http::Method;
use k8s_openapi::api::autoscaling::v1::Scale;
use reconcile::{ApiResource, Client, Error, Key};

/// The kind with this name in a group and version. `None` if it is not served.
pub async fn find_kind(client: &Client, api_version: &str, kind: &str) -> Result<Option<ApiResource>, Error> {
    match client.resources_for_group_version(api_version).await {
        Ok(kinds) => Ok(kinds.into_iter().find(|served| served.kind == kind)),
        Err(error) if error.is_not_found() => Ok(None),
        Err(error) => Err(error),
    }
}

/// Reads the scale of an object.
pub async fn get_scale(client: &Client, kind: &ApiResource, key: &Key) -> Result<Scale, Error> {
    let path = format!("{}/scale", kind.object(key));
    let value = client.request(Method::GET, &path, None).await?;
    serde_json::from_value(value).map_err(|source| Error::Decode { request: format!("GET {path}"), source })
}

/// Updates the scale of an object.
pub async fn update_scale(
    client: &Client,
    kind: &ApiResource,
    key: &Key,
    scale: &Scale,
) -> Result<(), Error> {
    let path = format!("{}/scale", kind.object(key));
    let body = serde_json::to_value(scale).map_err(Error::Encode)?;
    client.request(Method::PUT, &path, Some(&body)).await.map(drop)
}

/// The name of a kind in messages, for example `deployments.apps`.
pub fn group_resource(kind: &ApiResource) -> String {
    match kind.group.as_str() {
        "" => kind.plural.clone(),
        group => format!("{}.{group}", kind.plural),
    }
}
